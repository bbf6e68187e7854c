#!/usr/bin/env bash
# Trains on several machines under Slurm: one task a GPU, and no other launcher.
#
#     sbatch --nodes 4 --gpus-per-node 8 --ntasks-per-node 8 examples/gpt/slurm.sh \
#         --save /shared/runs/a --load /shared/runs/a --num-layers 24 ...
#
# What follows the script's name goes to pretrain_gpt.py. Two minutes before the time limit all ranks get SIGTERM, save
# and end; submitting the same line again goes on. The folders of the run and of the data must be
# on a file system that all machines share.
#SBATCH --job-name=pretrain_gpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --signal=TERM@120
#SBATCH --output=%x-%j.log
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:-.}"
# Each task finds its rank and the others (core/rendezvous/launchers.py). One that fails ends the others at once, and its
# exit status is the job's.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec srun --kill-on-bad-exit=1 \
    "${PYTHON:-.venv/bin/python}" examples/gpt/pretrain_gpt.py "$@"
