#!/bin/bash
# A run on several nodes under Slurm: one launcher per node, which starts a process per GPU.
#   sbatch --nodes 8 --gpus-per-node 8 scripts/launch/slurm.sh RECIPE [--KEY=VALUE ...]
# A job that is submitted again with the same arguments goes on from the last checkpoint, where there is one.
# `output` (OUTPUT here) has to be a folder that all nodes share. FLOWGRPO_LAUNCHER=torchrun takes torchrun.
#SBATCH --job-name flowgrpo
#SBATCH --ntasks-per-node 1
#SBATCH --cpus-per-task 64
#SBATCH --signal TERM@300
#SBATCH --requeue
set -euo pipefail

RECIPE=${1:?usage: sbatch scripts/launch/slurm.sh RECIPE [--KEY=VALUE ...]}
OUTPUT=${OUTPUT:-$PWD/runs}
GPUS=${SLURM_GPUS_ON_NODE:-8}
NODES=${SLURM_NNODES:-1}
read -r HOST < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
PORT=${MASTER_PORT:-29500}
NAME=$(basename "${RECIPE%.*}")
RUN=(-m flowgrpo train "$RECIPE" --output="$OUTPUT" --name="$NAME" --resume=auto "${@:2}")

if [ "${FLOWGRPO_LAUNCHER:-accelerate}" = torchrun ]; then
    COMMAND=(torchrun --nnodes "$NODES" --nproc_per_node "$GPUS" --node_rank @NODE@ --master_addr "$HOST"
             --master_port "$PORT" "${RUN[@]}")
else
    COMMAND=(accelerate launch --multi_gpu --num_machines "$NODES" --num_processes "$((NODES * GPUS))"
             --machine_rank @NODE@ --main_process_ip "$HOST" --main_process_port "$PORT" --mixed_precision no
             "${RUN[@]}")
fi
# A node knows its number, which takes the place of @NODE@.
srun --kill-on-bad-exit=1 bash -c 'exec "${@//@NODE@/$SLURM_NODEID}"' launch "${COMMAND[@]}"
