# shellcheck shell=bash
# Source it: a path may hold spaces, commas and equals signs, which mean something to Hydra's command line.
quoted() {
    local escaped="${1//\\/\\\\}"
    echo "\"${escaped//\"/\\\"}\""
}
