#!/bin/bash
# A run under Slurm: on each node one launcher, which starts a process per GPU. One GPU on one node needs no launcher.
#   sbatch --nodes 8 --gpus-per-node 8 --cpus-per-task 64 scripts/launch/slurm.sh RECIPE [--KEY=VALUE ...]
#   sbatch --array 0-2 --nodes 1 --gpus-per-node 1 --cpus-per-task 8 scripts/launch/slurm.sh RECIPE: a seed per task
# A job that is submitted again with the same arguments goes on from the last checkpoint, where there is one.
# `output` (OUTPUT here) has to be a folder that all nodes share. FLOWGRPO_LAUNCHER=torchrun takes torchrun.
#SBATCH --job-name flowgrpo
#SBATCH --ntasks-per-node 1
#SBATCH --signal USR1@300
#SBATCH --requeue
#SBATCH --open-mode append
set -euo pipefail

RECIPE=${1:?usage: sbatch scripts/launch/slurm.sh RECIPE [--KEY=VALUE ...]}
OUTPUT=${OUTPUT:-$PWD/runs}
NODES=${SLURM_NNODES:-1}
GPUS=${SLURM_GPUS_ON_NODE:-$( (nvidia-smi -L 2> /dev/null || true) | wc -l)}
if [ "$GPUS" -eq 0 ]; then
    echo "slurm.sh: no GPU: one process per node, on the CPU (for GPUs: sbatch --gpus-per-node N)"
    GPUS=1
fi
if [ "${SLURM_CPUS_ON_NODE:-$GPUS}" -lt "$GPUS" ]; then
    echo "slurm.sh: fewer CPUs ($SLURM_CPUS_ON_NODE) than processes ($GPUS) on a node: ask for more by sbatch --cpus-per-task N"
fi
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_ON_NODE:-$GPUS}  # of a node; a step would take one
read -r HOST < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
PORT=${MASTER_PORT:-$((10000 + ${SLURM_JOB_ID:-0} % 20000))}  # jobs on one node have ports of their own

NAME=$(basename "${RECIPE%.*}")
OPTIONS=()
for OPTION in "${@:2}"; do
    case $OPTION in
        --name=*) NAME=${OPTION#--name=} ;;
        *) OPTIONS+=("$OPTION") ;;
    esac
done
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then  # an array of seeds: runs of their own
    NAME+=-seed$SLURM_ARRAY_TASK_ID
    OPTIONS=("--seed=$SLURM_ARRAY_TASK_ID" "${OPTIONS[@]}")
fi
RUN=(-m flowgrpo train "$RECIPE" --output="$OUTPUT" --name="$NAME" --resume=auto "${OPTIONS[@]}")

if [ "$((NODES * GPUS))" -eq 1 ]; then
    COMMAND=(python "${RUN[@]}")
elif [ "${FLOWGRPO_LAUNCHER:-accelerate}" = torchrun ]; then
    COMMAND=(python -m flowgrpo.distributed.launchers torchrun --nnodes "$NODES" --nproc_per_node "$GPUS"
             --node_rank @NODE@ --master_addr "$HOST" --master_port "$PORT" "${RUN[@]}")
else
    COMMAND=(python -m flowgrpo.distributed.launchers accelerate launch --multi_gpu --num_machines "$NODES"
             --num_processes "$((NODES * GPUS))" --machine_rank @NODE@ --main_process_ip "$HOST"
             --main_process_port "$PORT" --mixed_precision no "${RUN[@]}")
fi
# A node knows its number, which takes the place of @NODE@.
srun --kill-on-bad-exit=1 bash -c 'exec "${@//@NODE@/$SLURM_NODEID}"' launch "${COMMAND[@]}"
