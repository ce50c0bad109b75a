# Sourced by the other scripts: a virtual environment with this project in it.
# Needs only sh, Python >= 3.11 and the ordinary pip client.

set -eu
# Else every process that a test starts, or that is measured, compiles the whole project again.
unset PYTHONDONTWRITEBYTECODE
cd "$(dirname "$0")/.."
constraints=ci/constraints.txt
python=.venv/bin/python
tested=test,opencl,vulkan

say() { printf '%s\n' "$*" >&2; }

# apt_install PACKAGE...: installs Debian packages, or says which to install and fails.
apt_install() {
    if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
        say "installing $* with apt-get"
        { apt-get install -y -qq "$@" || { apt-get update -qq && apt-get install -y -qq "$@"; }; } \
            >/dev/null 2>&1 && return 0
    fi
    say "please install: $*   (Debian/Ubuntu: sudo apt-get install $*)"
    return 1
}

find_python() {
    for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3 python3.14; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    say "Python 3.11 or newer is needed (set PYTHON to name it)"
    return 1
}

# Whether .venv has pip and is whole: a pip that was interrupted leaves packages without their lists
# of files, and can afterwards neither mend nor remove them.
is_whole() {
    for package in .venv/lib/python3*/site-packages/*.dist-info; do
        [ -e "$package/RECORD" ] || return 1
    done
    set -- .venv/lib/python3*/site-packages/pip .venv/lib/python3*/site-packages/pip-*.dist-info
    { [ ! -d "$1" ] || [ -d "$2" ]; } && "$python" -c 'import pip' >/dev/null 2>&1
}

# One script of a checkout installs at a time: two would empty each other's .venv. The lock is that of
# an open file, so it ends with unlock_environment, or with the script.
lock_environment() {
    exec 9<ci/environment.sh
    "$1" -c '
import fcntl, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
try:
    try:
        fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("waiting for another script, which installs here", file=sys.stderr, flush=True)
        fcntl.flock(9, fcntl.LOCK_EX)
except OSError:
    pass  # This file system has no locks.
'
}

unlock_environment() { exec 9<&-; }

make_environment() {
    base=$(find_python)
    lock_environment "$base"
    is_whole && return 0
    say "creating .venv with $($base --version)"
    if ! "$base" -m venv --clear .venv >/dev/null 2>&1; then
        apt_install python3-venv
        "$base" -m venv --clear .venv
    fi
}

# pip_install ARGUMENT...: quiet, within the tested versions. What is imported is compiled then.
pip_install() {
    "$python" -m pip install --quiet --disable-pip-version-check --no-compile -c "$constraints" "$@"
}

# install_project EXTRAS: the project with them, unless that was done here already. Other texts of
# the kernels are another native library, which installing builds.
install_project() {
    asked="$PWD $1 $(cat pyproject.toml "$constraints" accel/native/*.* accel/packets/*.py \
        accel/opencl/kernels/*.* contract/*.py | cksum)"
    if [ "$(cat .venv/installed 2>/dev/null)" != "$asked" ]; then
        say "installing zinc-rt into .venv and building its kernels: one to three minutes" \
            "(after Ctrl-C, pip deletes its copy of the compiler: up to one)"
        # The one that comes with Python 3.11 takes twice the time to read what an index offers.
        pip_install --upgrade pip || return 1
        pip_install -e ".${1:+[$1]}" || return 1
        echo "$asked" >.venv/installed
    fi
    unlock_environment
}

# An OpenCL device on the processor, for the fast tier.
install_pocl() {
    "$python" -c 'from accel.opencl.device import find_devices; find_devices()' 2>/dev/null && return 0
    apt_install pocl-opencl-icd
}

# A Vulkan device on the processor.
install_lavapipe() {
    "$python" -m accel.vulkan.report >/dev/null 2>&1 && return 0
    apt_install libvulkan1 mesa-vulkan-drivers
}

# What compiles Metal's text as C++, and kernels for Vulkan where pip has no compiler for them; what
# translates between the two, and the header that the binding of Vulkan is compared with.
install_compilers() {
    vulkan='from accel.vulkan.compiler import PACKAGES, installed; [installed(p) for p in PACKAGES]'
    "$python" -c "$vulkan" 2>/dev/null && command -v g++ >/dev/null &&
        command -v spirv-cross >/dev/null && [ -e /usr/include/vulkan/vulkan_core.h ] && return 0
    apt_install glslang-tools spirv-tools g++ spirv-cross libvulkan-dev
}

# The browser that drives the pages; Playwright's own is never downloaded.
install_chromium() {
    command -v chromium >/dev/null && return 0
    apt_install chromium fonts-dejavu-core
}
