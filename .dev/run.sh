cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD
HANGS=0
t() { [ $HANGS -ge 2 ] && return; timeout "$@"; [ $? = 124 ] && HANGS=$((HANGS+1)); }
nvidia-smi --query-gpu=name,clocks.sm,clocks.max.sm --format=csv
timeout 40 python3 -m pytest -q -x -p no:xdist -p no:cacheprovider tests/cuda/test_tuned_on_device.py -m device -k "blocks_of_many or several_tiles or single_warps" 2>&1 | tail -5
echo "keys and values apart"
t 30 python3 .dev/attn.py
MACROS=CHANNELS=64 CONTEXTS=512,8192 t 30 python3 .dev/attn.py
MACROS=STAGGER=300 CONTEXTS=512,8192 t 30 python3 .dev/attn.py
MACROS=STAGGER=600 CONTEXTS=512,8192 t 30 python3 .dev/attn.py
echo "next scores early"
PYTHONPATH=$PWD/.dev/early:$PWD t 30 python3 .dev/attn.py
PYTHONPATH=$PWD/.dev/early:$PWD MACROS=SKIP_SPREAD=1 CONTEXTS=8192 t 30 python3 .dev/attn.py
echo "first"
PYTHONPATH=$PWD/.dev/base:$PWD t 30 python3 .dev/attn.py
PYTHONPATH=$PWD/.dev/base:$PWD MACROS=SCORE_PARTS=2 CONTEXTS=8192 t 30 python3 .dev/attn.py
PYTHONPATH=$PWD/.dev/base:$PWD MACROS=USER_REGISTERS=232,SUPPLY_REGISTERS=40 CONTEXTS=8192 t 30 python3 .dev/attn.py
OLD=1 CONTEXTS=512,8192 t 30 python3 .dev/attn.py
TOKENS=2048 CONTEXTS=8192,32768 t 30 python3 .dev/attn.py
t 60 python3 .dev/prefill.py /tmp/8b.gguf
APART=1 PROMPTS=512,2048 t 60 python3 .dev/prefill.py /tmp/8b.gguf
OLD=1 APART=1 PROMPTS=512 t 60 python3 .dev/prefill.py /tmp/8b.gguf
STEPS=1024,2048 t 60 python3 .dev/prefill.py /tmp/8b.gguf
