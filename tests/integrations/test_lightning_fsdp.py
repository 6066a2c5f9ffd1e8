"""The Lightning callback on two gloo processes, with weights that FSDP2 has split."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from tests.integrations.test_transformers_fsdp import WORLD, free_port


def train_sharded(rank: int, port: int, folder: str, report: Any) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    from tests.torchvision_import import import_torchvision

    import_torchvision()
    import lightning.pytorch as lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    from optg.integrations.lightning import Sparsify
    from tests.integrations.test_lightning import QUIET, Loader, Net
    from tests.integrations.zeros import expected_zeros

    class ShardedNet(Net):
        def configure_model(self) -> None:
            if not hasattr(self, "sharded"):
                self.sharded = True
                fully_shard(self.layers[0], mesh=self.device_mesh["data_parallel"])
                fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def fit(distributed: bool, path: str | None) -> list[torch.Tensor]:
        options = {"data_parallel_size": WORLD, "tensor_parallel_size": 1, "process_group_backend": "gloo"}
        strategy = ModelParallelStrategy(save_distributed_checkpoint=distributed, **options)
        checkpoints = ModelCheckpoint(f"{folder}/{distributed}", filename="{epoch}", save_top_k=-1)
        callback, model = Sparsify("optg", sparsity=0.9), ShardedNet()
        given = {"strategy": strategy, "devices": WORLD, "plugins": [TorchElasticEnvironment()], **QUIET}
        trainer = lightning.Trainer(max_epochs=4, callbacks=[callback, checkpoints], use_distributed_sampler=False, **given)
        trainer.fit(model, Loader(), ckpt_path=path)
        weights = [p.full_tensor() for p in model.parameters()]
        assert callback.sparsifier and callback.sparsifier.clock.finished
        assert sum(int((w == 0).sum()) for w in weights if w.ndim > 1) == expected_zeros(Net(), 0.9)
        return weights

    for distributed in (False, True):
        whole = fit(distributed, None)
        resumed = fit(distributed, f"{folder}/{distributed}/epoch=1.ckpt")
        assert all(map(torch.equal, whole, resumed)), f"distributed={distributed}"
    report.put(rank)
    torch.distributed.barrier()  # a process that exits early breaks the connections of the others
    os._exit(0)  # a normal exit sometimes aborts in torch's own threads


@pytest.mark.filterwarnings("ignore")
def test_split_weights_resume_bit_for_bit(tmp_path: Path) -> None:
    """From a checkpoint in one file, which one process writes, and from a distributed one."""
    report = mp.get_context("spawn").SimpleQueue()
    mp.spawn(train_sharded, args=(free_port(), str(tmp_path), report), nprocs=WORLD)
    assert sorted(report.get() for _ in range(WORLD)) == list(range(WORLD))
