import torch

from optg.data.augment import crop_and_flip


def test_crop_and_flip_against_a_loop() -> None:
    chance = torch.Generator().manual_seed(0)
    images = torch.randint(1, 256, (9, 3, 5, 7), dtype=torch.uint8, generator=chance)  # not square; only the frame is 0
    index = torch.randint(9, (200,), generator=chance)
    top, left = torch.randint(5, (2, 200), generator=chance)
    flip = torch.randint(2, (200,), generator=chance).bool()
    made = crop_and_flip(images, index, top, left, flip, pad=2)
    for n in range(200):
        frame = torch.zeros(3, 9, 11, dtype=torch.uint8)
        frame[:, 2:7, 2:9] = images[index[n]]
        cut = frame[:, top[n] : top[n] + 5, left[n] : left[n] + 7]
        assert torch.equal(made[n], cut.flip(2) if flip[n] else cut)
