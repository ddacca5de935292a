#!/usr/bin/env bash
# One run over several machines without a batch system. Run it on every machine with the same words:
#
#   MASTER_ADDR=first-machine NODES=2 NODE=0 configs/cluster/torchrun.sh config.yaml [--section.key=value ...]
#
# NODE is 0 on the first machine, 1 on the second. The data and checkpoint.dir must be on a file system that all share.
set -eu
: "${MASTER_ADDR:?name or address of the first machine}" "${NODES:?number of machines}" "${NODE:?number of this one, from 0}"
GPUS=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

exec .venv/bin/torchrun --nnodes="$NODES" --node_rank="$NODE" --nproc_per_node="$GPUS" --max_restarts=0 \
  --master_addr="$MASTER_ADDR" --master_port="${MASTER_PORT:-29500}" \
  lightning_trainer.py fit -c "$1" --resume=auto --trainer.num_nodes="$NODES" --trainer.devices="$GPUS" "${@:2}"
