#!/usr/bin/env bash
# Several nodes without a scheduler: run the same line on every node, with the name of the first one. NOT RUN on GPUs here;
# launch.py, which builds the command, is tested, and so is torchrun itself with two and four ranks on a CPU.
#
#   FIRST_NODE=node0 NODES=8 GPUS_PER_NODE=8 bash examples/multi_node/torchrun.sh amos_base DATA [KEY=VALUE...]
#
# The same line resumes the run, also with another number of nodes: launch.py preserves the global batch.
set -euo pipefail
config="${1:?usage: torchrun.sh CONFIG_NAME DATA [KEY=VALUE...]}"
data="${2:?usage: torchrun.sh CONFIG_NAME DATA [KEY=VALUE...]}"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here/../.."                 # the YAMLs name the plugin and the save directory from the checkout
# Signals to torchrun itself: it passes these on to its ranks and gives them time to save, instead of dying at once (USR1,
# USR2) or killing them after 30 seconds. They are torchrun's --signals-to-handle and --shutdown-timeout as variables, which
# versions of PyTorch without these options ignore.
export PET_SIGNALS_TO_HANDLE="${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2}"
export PET_SHUTDOWN_TIMEOUT="${PET_SHUTDOWN_TIMEOUT:-300}"
# shellcheck source=examples/environment.sh
source examples/environment.sh
prepare_active_environment

exec python "$here/launch.py" --execute --config-name "$config" --data "$data" \
    --nodes "${NODES:-1}" --gpus-per-node "${GPUS_PER_NODE:-8}" --rendezvous "${FIRST_NODE:-localhost}:29500" \
    -- "${@:3}"
