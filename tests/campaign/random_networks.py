"""Part: random networks on every instruction set of this CPU, compared with torch in float64.

    python -m tests.campaign.random_networks --count 10000 --seed 0 --seconds 7200

A case is one network on one instruction set, in three batch sizes: seed 7 is network 7 // 3 on the second of three sets.
"""

import warnings

import torch

from optg.deploy.engine import build
from tests.campaign.seeds import parse_args, run_seeds
from tests.deploy.test_random_nets import check_random_net

FLAGS = build.cpu_flags().split()
ISAS = [isa for isa, flag in (("avx512", "avx512vl"), ("avx2", "avx2"), ("scalar", "")) if not flag or flag in FLAGS]


def case(seed: int) -> str:
    number, isa = divmod(seed, len(ISAS))
    check_random_net(number, ISAS[isa])
    return ISAS[isa]


def prepare() -> None:
    """Import torch's modules and compile the engine before the first fork."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for seed in range(len(ISAS)):
        case(seed)


def main() -> None:
    args = parse_args(__doc__)
    prepare()
    run_seeds(case, args.count, args.seed, args.seconds)


if __name__ == "__main__":
    main()
