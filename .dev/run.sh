cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD
timeout 15 python3 .dev/attn.py
timeout 20 python3 .dev/prefill.py /tmp/8b.gguf
STEPS=1024 PROMPTS=2048,8192,32768 timeout 20 python3 .dev/prefill.py /tmp/8b.gguf
