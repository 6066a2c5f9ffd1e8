"""Train a sparse vision transformer on handwritten digits with the Hugging Face Trainer. Two lines are about sparsity.

python examples/transformers_digits.py
"""

import argparse
import tempfile

import numpy as np
import torch
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from optg.data import digits
from optg.integrations.transformers import Sparsify


def small_vit() -> ViTForImageClassification:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **sizes)
    return ViTForImageClassification(config)


def rows(images: torch.Tensor, labels: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    return [{"pixel_values": image, "labels": label} for image, label in zip(images, labels)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--sparsity", type=float, default=0.8)
    options = parser.parse_args()
    torch.manual_seed(0)
    train, test = (rows(*split) for split in digits.load())
    model, callback = small_vit(), Sparsify("optg", sparsity=options.sparsity, floor=0.02)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=64,
            learning_rate=2e-3,
            save_strategy="no",
            report_to="none",
        )
        trainer = Trainer(model, arguments, train_dataset=train, callbacks=[callback])
        trainer.train()
        predicted = trainer.predict(test)
    accuracy = np.mean(predicted.predictions.argmax(1) == predicted.label_ids)
    print(f"accuracy {accuracy:.2%}, sparsity {callback.sparsifier.sparsity:.4f}")


if __name__ == "__main__":
    main()
