cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD
HANGS=0
t() { [ $HANGS -ge 2 ] && return; timeout "$@"; [ $? = 124 ] && HANGS=$((HANGS+1)); }
t 20 python3 .dev/attn.py
MACROS=TURNS=0 CONTEXTS=512,32768 t 10 python3 .dev/attn.py
MACROS=TURNS=2 CONTEXTS=512,32768 t 10 python3 .dev/attn.py
MACROS=CHANNELS=64 CONTEXTS=512,32768 t 10 python3 .dev/attn.py
t 25 python3 .dev/prefill.py /tmp/8b.gguf
APART=1 PROMPTS=64,512 t 15 python3 .dev/prefill.py /tmp/8b.gguf
TIMES=6 PROMPTS=64,512 t 15 python3 .dev/prefill.py /tmp/8b.gguf
STEPS=1024 PROMPTS=2048,8192,32768 t 25 python3 .dev/prefill.py /tmp/8b.gguf
STEPS=2048 PROMPTS=2048,8192 t 25 python3 .dev/prefill.py /tmp/8b.gguf
