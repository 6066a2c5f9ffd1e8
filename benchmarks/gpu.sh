#!/bin/sh
# The GPU measurements of docs/speed.md and docs/structures.md: steps, cuts, other libraries, 2:4 layers, shrunk models, and runs
# that share a GPU.
# Run it from the root of the repository: benchmarks/gpu.sh CIFAR_FOLDER
set -eux
python benchmarks/ranking.py --device cuda --scores 100000 1000000 10000000 25500000 100000000
python benchmarks/ranking.py --device cuda --scores 1000000000 --ways keep_top "in place" torch.sort topk # kthvalue would take 8 s per cut
python benchmarks/overhead.py --model resnet50 --mode eager --rounds 5 --steps 4 \
    --methods optg gmp rigl dpf acdc taylor feather phoenix str st3-sigma dnw gsm supermask
python benchmarks/overhead.py --model resnet50 --mode compiled --rounds 5 --steps 4 --methods optg rigl feather phoenix str
python benchmarks/overhead.py --model vit_s lm resnet32 --mode eager --rounds 5 --steps 4 --methods optg rigl
python benchmarks/overhead.py --model vgg19 --mode graph --methods optg rigl feather
python benchmarks/peers.py --model resnet50
python benchmarks/structures.py --device cuda
python benchmarks/semi_structured.py --output semi-structured.jsonl
python benchmarks/shrunk.py
for share in --mps ""; do
    python benchmarks/throughput.py --recipe vgg19-cifar100 --method optg --epochs 10 --runs 1 2 4 8 --folder "$1" $share
done
