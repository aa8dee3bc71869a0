#!/usr/bin/env bash
# Everything that must hold before a change lands: lint, format, types, doctests and tests, docs.
#   scripts/check.sh          the quick tests
#   scripts/check.sh --all    also those marked slow, statistical or gpu (skipped without a GPU)
#   scripts/check.sh --versions   the quick tests with the oldest and the newest releases (scripts/versions.py)
#   scripts/check.sh --package [FOLDER]   sdist and wheel, also left in FOLDER; the wheel alone runs the quickstart
# Words after the others go to pytest: scripts/check.sh --all -k plan
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1
export TOKENIZERS_PARALLELISM=false
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # pytest runs two processes
unset PYTHONDONTWRITEBYTECODE                  # tests start many processes: none compiles anew

package() { # the wheel is made from the sdist, so each has to have what the next one needs
  local root="$PWD"
  [[ -z "${1:-}" ]] || { mkdir -p "$1" && set -- "$(cd "$1" && pwd)"; }
  unset PYTHONPATH # pip would take a checkout there for an install
  folder="$(mktemp -d)"
  trap 'rm -rf "$folder"' EXIT
  python3 -m venv "$folder/tools"
  "$folder/tools/bin/pip" install --quiet build twine
  "$folder/tools/bin/python" -m build --outdir "$folder/dist" "$root"
  "$folder/tools/bin/twine" check --strict "$folder"/dist/*
  python3 -m venv "$folder/bare"
  cd "$folder"
  bare/bin/pip install --quiet -c "$root/constraints.txt" "$(echo dist/*.whl)[demo]"
  bare/bin/python -c "import hf_dpzero as h; [getattr(h, name) for name in h.__all__]"
  bare/bin/hf-dpzero train quickstart --output_dir out
  [[ -z "${1:-}" ]] || cp dist/* "$1"
}

case "${1:-}" in
  --versions) exec python -m scripts.versions "${@:2}" ;;
  --package)
    package "${2:-}"
    exit
    ;;
esac

select=()
if [[ "${1:-}" == "--all" ]]; then
  select=(-m "")
  shift
fi

step() { printf '\n== %s\n' "$*"; "$@"; }

docs() { # a build into a folder that is thrown away
  local site status=0
  site="$(mktemp -d)"
  mkdocs build --strict --quiet --site-dir "$site" || status=$?
  rm -rf "$site"
  return "$status"
}

step ruff check .
step ruff format --check .
if command -v mkdocs >/dev/null; then # on one core, while mypy takes the other
  export NO_MKDOCS_2_WARNING=1         # an announcement by the theme, on every build
  said="$(mktemp)"
  trap 'rm -f "$said"' EXIT
  docs >"$said" 2>&1 &
  building=$!
  failed=0
  step mypy || failed=1
  wait "$building" || failed=1
  printf '\n== mkdocs build --strict --quiet\n'
  cat "$said"
  [[ "$failed" == 0 ]]
else
  step mypy
fi
# a module's tests run in one process, as its fixtures are made once; those with slow tests come first
step python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
  ${select[@]+"${select[@]}"} "$@"
