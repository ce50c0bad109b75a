# Sourced by ci/test: runs of pytest, several of them for all tests.

running=

# A process for each core, or $workers. Benchmarks cannot be timed beside each other: see ci/speed.
run() {
    ${behind:-} "$python" -m pytest -n "${workers:-auto}" --dist worksteal --benchmark-disable \
        --hypothesis-profile "$profile" --durations 20 "$@" &
    running=$!
    wait $running
}

# compute PART...: the tests in the folders of each part, one part after the other.
compute() {
    computed=0
    for part in "$@"; do
        folders=
        for name in $part; do
            folders="$folders tests/$name"
        done
        run -m "$selection" $folders || computed=$?
    done
    return $computed
}

# run_all PART...: all tests. Those of the parts compute; of the rest a tenth of the time is waiting
# for servers, pages and peers: two cores have four processes then. Where memory holds both, the
# parts run beside the rest, which goes first: what waits leaves them the processor. What they say
# comes behind what the rest says, and last of all whether anything failed.
run_all() {
    others=tests status=0
    for name in $*; do
        others="$others --ignore=tests/$name"
    done
    # A process takes up to 1.5 GB.
    beside=$("$python" -c 'import psutil
cores = psutil.cpu_count(False) or 2
print(int(psutil.virtual_memory().available > 1.5e9 * (cores + max(4, cores))))')
    if [ "$beside" = 1 ]; then
        said=$(mktemp)
        (
            trap 'kill $running || :; wait; exit 143' TERM
            behind='nice -n 10'
            compute "$@"
        ) >"$said" 2>&1 &
        computing=$!
        trap 'kill $computing $running ${compiling:-} || :; wait; cat "$said"; rm -f "$said"; exit 130' INT TERM
    else
        compute "$@" || status=$?
    fi
    workers=$("$python" -c 'import psutil; print(max(4, psutil.cpu_count(False) or 0))')
    run -m "$selection" $others || status=$?
    if [ "$beside" = 1 ]; then
        wait $computing || status=$?
        cat "$said"
        rm -f "$said"
    fi
    [ $status = 0 ] || echo 'Tests failed: see above.'
    return $status
}
