#!/bin/bash
# Starts the server of the demo; don't use it in production.
docker run --gpus=1 --rm -it -p8000:8000 -p 8001:8001 --shm-size=1g --ulimit memlock=-1 \
    -e CUDA_VISIBLE_DEVICES=0 -v "${PWD}/model repository":/models \
    nvcr.io/nvidia/tritonserver:22.07-py3 tritonserver --model-repository=/models --model-namespacing=true \
    --pinned-memory-pool-byte-size=268435456 --log-verbose 1 2>&1 | tee server.log
