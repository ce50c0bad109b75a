# Sourced by ci/test: llama.cpp, for the tests marked peer, is built from source once for each kind
# of processor and kept as a wheel.

wheels=${ZINC_RT_WHEELS:-${XDG_CACHE_HOME:-$HOME/.cache}/zinc-rt/wheels}

# processor [CPUINFO]: what the compiler may take for granted on this one.
processor() {
    uname -sm
    if [ -r "${1:-/proc/cpuinfo}" ]; then
        grep -iE '^(flags|features|isa|cpu|cpu part)[[:space:]]*:' "${1:-/proc/cpuinfo}" | sort -u
    else
        sysctl -n machdep.cpu.brand_string 2>/dev/null || true
    fi
}

# peer_flags COMPILER: no AMX. A processor may have it where the system does not enable it, and then
# its instructions are illegal. Given to the compiler these win over -march=native, which
# llama.cpp's build adds: its own GGML_AMX options only say what is added without that. A compiler
# that knows no AMX makes none.
peer_flags() {
    [ "$(uname -m)" = x86_64 ] || return 0
    for flag in -mno-amx-tile -mno-amx-int8 -mno-amx-bf16; do
        if echo 'int x;' | "$1" "$flag" -x c -fsyntax-only - 2>/dev/null; then
            printf '%s ' "$flag"
        fi
    done
}

# peer_key REQUIREMENT [CPUINFO]: names the folder of wheels that may run here.
peer_key() {
    { echo "$1 without AMX"; processor "${2:-}"; } | "$python" -c '
import hashlib, sys
print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest()[:16])'
}

install_peer() {
    requirement=$(grep '^llama-cpp-python==' "$constraints")
    key=$(peer_key "$requirement") || return 1
    # The environment may have come from another machine, as the wheels may.
    [ "$(cat .venv/peer-key 2>/dev/null)" != "$key with its server" ] || return 0
    kept=$wheels/$key
    if ! pip_install --no-index --find-links "$kept" --no-deps --force-reinstall "$requirement" \
        2>/dev/null; then
        for tool in g++ cmake; do
            command -v $tool >/dev/null 2>&1 || apt_install $tool || return 1
        done
        say "building llama.cpp for the peer tests: about three minutes, once for this processor"
        mkdir -p "$kept"
        flags=$(peer_flags "${CC:-cc}")
        # Pip's own cache of wheels does not know for which processor one was built.
        CFLAGS="${CFLAGS:-} $flags" CXXFLAGS="${CXXFLAGS:-} $flags" \
            CMAKE_ARGS="${CMAKE_ARGS:-} -DCMAKE_PROJECT_INCLUDE=$PWD/ci/peer.cmake" \
            CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)} \
            "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-cache-dir \
            --wheel-dir "$kept" "$requirement" || return 1
        pip_install --no-index --find-links "$kept" --no-deps --force-reinstall "$requirement" ||
            return 1
    fi
    pip_install diskcache fastapi pydantic-settings PyYAML sse-starlette starlette-context uvicorn ||
        return 1
    echo "$key with its server" >.venv/peer-key
}
