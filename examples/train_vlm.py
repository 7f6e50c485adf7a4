"""Train a small vision-language model on documents of several images, in two processes.

    python examples/train_vlm.py

Documents are conversations about one to four pictures of any size; they are made here, and nothing is
downloaded. A processor of Qwen2.5-VL makes ids and patches. Cells of as many documents as fit go through the
model as one sequence, without padding. The loss is the mean over the targets of all processes. For a model of
your own, replace `small_processor()` by `AutoProcessor.from_pretrained(…)`.
"""

import argparse
import contextlib
import io
import json
import random
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import streamload
from streamload.integrations.conversations import Conversations

COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "black", "white")
SPECIAL = ["<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class WithoutVideos(Qwen2_5_VLProcessor):
    """The processor of Qwen2.5-VL; its part for videos would need torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        """Allow that there is no part for videos."""
        is_video = argument_name == "video_processor"
        return None if is_video else super().check_argument_for_proper_class(argument_name, argument)


def small_processor() -> WithoutVideos:
    """Qwen2.5-VL's form with bytes as tokens, and images of 4 to 16 image tokens."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", additional_special_tokens=SPECIAL
    )
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 4 * 28 * 28, "longest_edge": 16 * 28 * 28})
    return WithoutVideos(images, fast, None, chat_template=TEMPLATE)


class SmallVlm(nn.Module):
    """A transformer over image tokens and bytes of flat batches, in which samples don't see each other."""

    def __init__(self, vocabulary: int, image_token: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.image_token = image_token
        self.patches = nn.Linear(1176, width)
        self.merger = nn.Sequential(nn.Linear(4 * width, width), nn.GELU(), nn.Linear(width, width))
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.ModuleList(nn.Embedding(1024, width) for _ in range(3))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The summed loss of a flat batch."""
        ids, labels = batch["input_ids"], batch["labels"]
        images = self.merger(self.patches(batch["pixel_values"]).unflatten(0, (-1, 4)).flatten(1))
        tokens = self.words(ids).masked_scatter((ids == self.image_token)[..., None], images)
        for places, positions in zip(self.places, batch["position_ids"], strict=True):
            tokens = tokens + places(positions)
        sample = torch.bucketize(torch.arange(ids.shape[1]), batch["cu_seqlens"], right=True)
        hidden = (sample[:, None] != sample) | torch.ones(len(sample), len(sample)).triu(1).bool()
        logits = self.head(self.layers(tokens, mask=hidden))
        return functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")


def write_documents(folder: Path, samples: int, samples_per_shard: int = 64) -> None:
    """Write shards of conversations: their JSON, and images as `0.jpg`, `1.jpg`, …"""
    rng = random.Random(0)
    folder.mkdir(parents=True)
    for first in range(0, samples, samples_per_shard):
        with tarfile.open(folder / f"{first // samples_per_shard:05d}.tar", "w") as tar:
            for number in range(first, min(first + samples_per_shard, samples)):
                for extension, content in document(rng).items():
                    member = tarfile.TarInfo(f"{number:06d}.{extension}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def document(rng: random.Random) -> dict[str, bytes]:
    """A conversation about some pictures, in OpenAI's form, and the pictures."""
    colours = rng.choices(COLOURS, k=rng.randint(1, 4))
    pictures = {f"{number}.jpg": picture(colour, rng) for number, colour in enumerate(colours)}
    question: list[dict[str, str]] = [{"type": "image", "image": name} for name in pictures]
    question.append({"type": "text", "text": "Which colours?" if len(colours) > 1 else "Which colour?"})
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": ", ".join(colours)},
    ]
    return {"json": json.dumps({"messages": messages}).encode(), **pictures}


def picture(colour: str, rng: random.Random) -> bytes:
    """A disk of this colour on grey, of any size and shape."""
    size = rng.randint(40, 240), rng.randint(40, 240)
    image = Image.new("RGB", size, "grey")
    ImageDraw.Draw(image).ellipse((4, 4, size[0] - 4, size[1] - 4), colour)
    encoded = io.BytesIO()
    image.save(encoded, "JPEG", quality=90)
    return encoded.getvalue()


def train(rank: int, world: int, scratch: str, steps: int, cells: int) -> None:
    """One process's training."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{scratch}/ranks", rank=rank, world_size=world)
    processor = small_processor()
    recipe = Conversations(processor, max_length=4096)
    loader = streamload.make_loader(
        f"{scratch}/documents",
        batch_size=cells,
        num_workers=1,
        cache_dir=f"{scratch}/cache",
        shards=streamload.Shards(facts={("tokens", "patches"): recipe.costs}),
        batches=streamload.Batches(cost=("tokens", "patches"), max_tokens=600, max_patches=480),
        workers=streamload.Workers(map_sample=recipe.example, collate=recipe.flat),
        order=streamload.Order(num_batches=steps),
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(SmallVlm(len(processor.tokenizer), processor.image_token_id))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with loader:
        for step, batch in enumerate(loader, 1):
            # Gradients of the mean over the targets of all processes, however many each of them has.
            targets = torch.tensor(float(sum((cell["labels"][0, 1:] != -100).sum() for cell in batch)))
            dist.all_reduce(targets)
            summed = torch.zeros(())
            for cell in loader.microbatches(batch):
                with contextlib.nullcontext() if cell.is_last else model.no_sync():
                    loss = model(cell)
                    (loss * world / targets).backward()  # DistributedDataParallel divides by world
                summed += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(summed)
            if rank == 0 and (step % 10 == 0 or step == 1):
                sizes = [f"{cell['input_ids'].numel()} + {len(cell['pixel_values'])}" for cell in batch]
                print(
                    f"step {step}: loss {summed / targets:.3f}, tokens + patches {', '.join(sizes)}",
                    flush=True,
                )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--cells", type=int, default=2, help="of each process in a step")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        write_documents(Path(scratch) / "documents", samples=384)
        torch.multiprocessing.spawn(
            train, (args.processes, scratch, args.steps, args.cells), nprocs=args.processes
        )


if __name__ == "__main__":
    main()
