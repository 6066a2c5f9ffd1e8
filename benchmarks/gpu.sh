#!/bin/sh
# The GPU measurements of docs/speed.md and docs/structures.md: cuts, steps, other libraries, structures, 2:4 layers, a shrunk
# model, and runs that share a GPU. Run it from the root of the repository:
#
#     benchmarks/gpu.sh CIFAR_FOLDER [PART …]
#
# PARTs are cuts, steps, compiled, models, peers, structures, two-four, shrunk and sharing; without any, all are measured. A part
# that fails does not stop the others. `two-four` continues where it was stopped: shapes in semi-structured.jsonl are not
# repeated. PYTHON is the Python to use.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
data=${1:?give the folder of CIFAR-100}
shift
failed=""

bench() {
    script=$1
    shift
    echo "+ benchmarks/$script $*"
    "${PYTHON:-python}" "benchmarks/$script" "$@" || failed="$failed $part"
}

for part in ${*:-cuts steps compiled models peers structures two-four shrunk sharing}; do
    case $part in
    cuts)
        bench ranking.py --device cuda --scores 100000 1000000 10000000 25500000 100000000
        bench ranking.py --device cuda --scores 1000000000 --ways keep_top "in place" torch.sort topk # kthvalue: 8 s per cut
        ;;
    steps)
        bench overhead.py --model resnet50 --mode eager --rounds 5 --steps 4 \
            --methods optg gmp rigl dpf acdc taylor feather phoenix str st3-sigma dnw gsm supermask
        ;;
    compiled) bench overhead.py --model resnet50 --mode compiled --rounds 5 --steps 4 --methods optg rigl feather phoenix str ;;
    models)
        bench overhead.py --model vit_s lm resnet32 --mode eager --rounds 5 --steps 4 --methods optg rigl
        bench overhead.py --model vgg19 --mode graph --methods optg rigl feather
        ;;
    peers) bench peers.py --model resnet50 ;;
    structures) bench structures.py --device cuda ;;
    two-four) bench semi_structured.py --output semi-structured.jsonl ;;
    shrunk) bench shrunk.py ;;
    sharing)
        for share in --mps ""; do
            bench throughput.py --recipe vgg19-cifar100 --method optg --epochs 10 --runs 1 2 4 8 --folder "$data" $share
        done
        ;;
    *)
        echo "unknown part $part" >&2
        failed="$failed $part"
        ;;
    esac
done
[ -z "$failed" ] || { echo "failed:$failed" >&2 && exit 1; }
