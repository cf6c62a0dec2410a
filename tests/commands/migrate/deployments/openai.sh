#!/bin/sh
docker run --rm --gpus=all -v /llm:/llm nvcr.io/nvidia/tritonserver:24.12-vllm-python-py3 \
    python3 openai_frontend/main.py --model-repository /llm --tokenizer acme/llama \
    --openai-restricted-api inference,model-repository,metrics x-key "$KEY" \
    --tool-call-parser=llama3 --kserve-http-port "$PORT" --new-flag
