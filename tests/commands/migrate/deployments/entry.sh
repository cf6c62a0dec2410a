#!/usr/bin/env bash
set -euo pipefail
if [ -n "${DEBUG:-}" ]; then EXTRA="--log-verbose=2"; fi
exec /opt/tritonserver/bin/tritonserver --model-store "$1" ${EXTRA:-} --model-control-mode=explicit \
  --allow-vertex-ai=true --allow-sagemaker=false --http-header-forward-pattern='^x-.*' "$@"
