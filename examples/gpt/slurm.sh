#!/usr/bin/env bash
# Trains on several machines under Slurm: one task a GPU, and no other launcher.
#
#     sbatch --nodes 4 --gpus-per-node 8 --ntasks-per-node 8 examples/gpt/slurm.sh --save /shared/runs/a --num-layers 24 ...
#
# What follows the script's name goes to pretrain_gpt.py. Two minutes before the time limit all ranks get SIGTERM, save
# and end; submitting the same line with --load /shared/runs/a goes on. The folders of the run and of the data must be
# on a file system that all machines share.
#SBATCH --job-name=pretrain_gpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --signal=TERM@120
#SBATCH --output=%x-%j.log
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:-.}"
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
export PYTHON=${PYTHON:-.venv/bin/python}

# A rank that fails ends the others at once, and its exit status is the job's.
exec srun --kill-on-bad-exit=1 bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    exec "$PYTHON" examples/gpt/pretrain_gpt.py "$@"' pretrain_gpt "$@"
