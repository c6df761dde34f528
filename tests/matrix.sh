#!/usr/bin/env bash
# The tests that depend on versions, on the oldest and on the newest ones, on every Python at hand.
# Environments are kept in .venv-matrix/, so a second call installs nothing.
#
#   make matrix                                   all
#   make matrix ONLY=py3.11-oldest                one
#   make matrix PYTEST_ARGS="tests -m 'not slow'" other tests
set -uo pipefail
cd "$(dirname "$0")/.."
UV=${UV:-uv}
WORKERS=${WORKERS:-2}
LIMIT=${LIMIT:-2400} # seconds for one set of versions
# What is left out runs on the versions of .venv: docs, examples, the corpus, the browser.
core=(tests/rules tests/taps tests/layers tests/losses tests/modes tests/test_bit_identity.py
    tests/test_guard_fit.py tests/test_guard_events.py tests/test_loop.py tests/test_policy.py
    tests/test_recorder.py tests/test_session.py tests/test_skip_non_finite.py
    tests/tensorboard/test_events.py tests/tensorboard/test_record_file.py
    tests/tensorboard/test_thinning.py)
# What the Python itself decides: lines and frames, warnings, AutoGraph, threads, signals. The middle
# sets have libraries that another set or .venv has, so they run this part alone.
python=(tests/diagnosis/test_source.py tests/test_errors.py tests/test_notices.py
    tests/test_terminal.py)
middle=("${python[@]}" tests/modes/test_faults.py tests/test_loop.py)
export TF_CPP_MIN_LOG_LEVEL=3 UV_LINK_MODE=${UV_LINK_MODE:-copy}

# TensorBoard before 2.21 imports pkg_resources, which setuptools 82 no longer has.
oldest=(tensorflow==2.16.1 keras==3.7.0 numpy==1.26.4 tensorboard==2.16.2 'setuptools<82')
newest=(--upgrade tensorflow keras numpy tensorboard)

failed=() summary=()
count() { # the results pytest wrote -> "N passed, N failed, N skipped, N s"
    "$1" - "$2" <<'EOF'
import sys, xml.etree.ElementTree as tree
suite = tree.parse(sys.argv[1]).getroot().find("testsuite")
tests, skipped, bad = (sum(int(suite.get(key)) for key in keys.split())
                       for keys in ("tests", "skipped", "failures errors"))
print(f"{tests - skipped - bad} passed, {bad} failed, {skipped} skipped, {float(suite.get('time')):.0f} s")
EOF
}

try() { # name, python, requirements...
    local name=$1 interpreter=$2
    shift 2
    [[ -z ${ONLY:-} || $ONLY == "$name" ]] || return
    local home=.venv-matrix/$name
    echo "=== $name: $*"
    [[ -x $home/bin/python ]] || "$UV" venv --quiet --no-python-downloads --python "$interpreter" "$home" \
        || { summary+=("$name: no such Python here, left out"); return; }
    "$UV" pip install --quiet --python "$home/bin/python" --editable '.[plot]' --group tests "$@" \
        || { failed+=("$name"); summary+=("$name: cannot be installed"); return; }
    "$home/bin/python" -c 'import sys, tensorflow, keras, numpy, tensorboard as tb
print("Python", sys.version.split()[0], "TensorFlow", tensorflow.__version__, "Keras", keras.__version__,
      "NumPy", numpy.__version__, "TensorBoard", tb.__version__)'
    # Old versions warn about things that are long mended; the newest run is the strict one.
    local warnings=()
    [[ $name == *oldest* ]] && warnings=(-W default)
    local tests=("${core[@]}" "${python[@]}")
    case $name in py3.12-* | py3.11-newest) tests=("${middle[@]}") ;; esac
    tests+=(-m 'not slow')
    [[ -z ${PYTEST_ARGS:-} ]] || eval "tests=($PYTEST_ARGS)"
    rm -f "$home/results.xml"
    timeout "$LIMIT" "$home/bin/python" -m pytest -q -n "$WORKERS" --dist worksteal \
        --junitxml "$home/results.xml" "${warnings[@]}" "${tests[@]}" || failed+=("$name")
    summary+=("$name: $(count "$home/bin/python" "$home/results.xml" 2>/dev/null \
        || echo "no results; the limit is $LIMIT s")")
}

for version in 3.11 3.12 3.13; do
    interpreter=$(command -v "python$version")
    if ! "$interpreter" -c '' 2>/dev/null; then
        interpreter=$(ls -d "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python 2>/dev/null | tail -1)
    fi
    [[ -n $interpreter ]] || { summary+=("py$version: no such Python here, left out"); continue; }
    # TensorFlow 2.16 has no wheels for Python 3.13.
    [[ $version == 3.13 ]] || try "py$version-oldest" "$interpreter" "${oldest[@]}"
    try "py$version-newest" "$interpreter" "${newest[@]}"
done

printf '=== %s\n' "${summary[@]}"
if ((${#failed[@]})); then
    printf 'failed: %s\n' "${failed[@]}"
    exit 1
fi
