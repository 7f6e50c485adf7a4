"""A small training on images and labels, for strategies.py: one network for all contenders."""

from collections.abc import Iterable

import torch
from torch import nn

from benchmarks.contenders.job import SIDE, Epoch, Job
from benchmarks.contenders.workload import timed

Batch = tuple[torch.Tensor, torch.Tensor]
CLASSES = 14


def classifier() -> nn.Module:
    """A network so small that loading is most of an epoch."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.AvgPool2d(8)]
    for before, after in ((3, 16), (16, 32)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES))


def epochs_of(loader: Iterable[Batch], job: Job) -> list[Epoch]:
    """Three epochs: the first, one that only loads, and one that trains."""
    return [timed(loader, job, _look), timed(loader, job, _look), train(loader, job)]


def train(loader: Iterable[Batch], job: Job) -> Epoch:
    """An epoch of training; its `channel_mean` is the mean loss."""
    model = classifier().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(batch: Batch, is_first: bool) -> tuple[int, float]:
        images, labels = batch
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return len(images), loss.item()

    return timed(loader, job, step)


def _look(batch: Batch, is_first: bool) -> tuple[int, float]:
    images, labels = batch
    if is_first:
        assert images.shape == (len(labels), 3, SIDE, SIDE), images.shape
        assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    return len(images), images[:, 0].mean().item()
