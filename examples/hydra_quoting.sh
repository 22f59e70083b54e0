# shellcheck shell=bash
# Source this file. quoted PATH: escape spaces, commas and equals signs, which Hydra's command line interprets.
quoted() {
    local escaped="${1//\\/\\\\}"
    echo "\"${escaped//\"/\\\"}\""
}
