#!/usr/bin/env bash
# One run over several machines with SLURM: one task per GPU. Two minutes before the time limit SLURM sends SIGUSR1 to
# every task; the run saves the step and ends with exit code 143, and the job goes back into the queue to go on there.
#
#   sbatch configs/cluster/slurm.sh config.yaml [--section.key=value ...]
#
# The repository, its .venv, the data and checkpoint.dir must be on a file system that all machines share.
#SBATCH --job-name=rwkv7
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -u
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"

srun --kill-on-bad-exit=0 .venv/bin/python lightning_trainer.py fit -c "$1" --resume=auto \
  --trainer.num_nodes="$SLURM_NNODES" --trainer.devices="$SLURM_NTASKS_PER_NODE" "${@:2}"
code=$?

# 143: saved because of a signal. 6: a process or the connection to it was lost.
if [ "$code" -eq 143 ] || [ "$code" -eq 6 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
