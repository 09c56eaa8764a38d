#!/bin/bash
# On every node, with the address of the first one: bash torchrun.sh node0
# torchrun starts the processes, and starts all of them again when one fails; they resume from the newest checkpoint.
torchrun --nnodes=2 --nproc-per-node=1 --max-restarts=10 --rdzv-backend=c10d --rdzv-endpoint="$1:29500" \
  --no-python meshdsl train train.py --mesh data=2,model=8 --folder /shared/runs/train --resume
