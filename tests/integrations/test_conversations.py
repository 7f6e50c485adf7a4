"""Conversations beside the processors, templates and models of transformers, and through a whole loader.

transformers is imported as the tests run: it takes a second of each process that collects this file.
"""

import io
import itertools
import json
import logging
import math
import pickle
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import streamload
from streamload.errors import (
    CaptionError,
    DecodeError,
    ImageTooLarge,
    OptionError,
    SampleError,
    StateMismatch,
)
from streamload.integrations.conversations import Conversations

SEEDS = range(40)

pytestmark = pytest.mark.deep
"""Each process that imports transformers needs six seconds for it."""


@pytest.fixture(scope="module")
def made() -> Any:
    return pytest.importorskip("tests.support.qwen_vl", reason="needs transformers 5", exc_type=ImportError)


@pytest.fixture(scope="module")
def recipe(made: Any) -> Conversations:
    return Conversations(made.processor())


@pytest.fixture(scope="module")
def samples(made: Any, recipe: Conversations) -> list[tuple[Any, ...]]:
    """Raw samples, the messages and members that they mean, and their examples."""
    return [(*sample, recipe.example(sample[0])) for sample in map(made.sample, SEEDS)]


def members(raw: dict[str, Any], made: Any) -> dict[str, Any]:
    """What a function of facts gets of a sample."""
    images = made.sizes(raw)
    return {name: data for name, data in raw.items() if name not in images} | {"__images__": images}


def by_the_processor(processor: Any, raw: dict[str, Any], messages: Any, shown: list[str]) -> Any:
    images = [Image.open(io.BytesIO(raw[name])) for name in shown]
    text = processor.apply_chat_template(messages)
    return processor(text=[text], images=images or None, return_tensors="pt")


def test_ids_pixels_and_grids_are_those_of_the_processor_to_the_bit(
    made: Any, samples: list[tuple[Any, ...]]
) -> None:
    processor, counts = made.processor(), set()
    for seed, (raw, messages, shown, example) in enumerate(samples):
        expected = by_the_processor(processor, raw, messages, shown)
        assert torch.equal(example["input_ids"], expected["input_ids"][0]), seed
        if shown:
            assert torch.equal(example["pixel_values"], expected["pixel_values"]), seed
            assert torch.equal(example["image_grid_thw"], expected["image_grid_thw"]), seed
        else:
            assert example["pixel_values"].shape == (0, 1176)
            assert example["image_grid_thw"].shape == (0, 3)
        counts.add(len(shown))
    assert counts == set(range(7))


def test_costs_are_the_lengths_of_the_example_by_the_sizes_of_its_images(
    made: Any, recipe: Conversations, samples: list[tuple[Any, ...]]
) -> None:
    for raw, _, _, example in samples:
        assert recipe.costs(members(raw, made)) == (len(example["input_ids"]), len(example["pixel_values"]))


def learned(processor: Any, ids: list[int], text: str, turn: str) -> list[bool]:
    """Which ids of a text, without images, have a byte of what a pattern finds in it; one by one."""
    names = processor.tokenizer.convert_ids_to_tokens(ids)
    special = set(processor.tokenizer.all_special_tokens)
    spans = [
        (len(text[: found.start(1)].encode()), len(text[: found.end(1)].encode()))
        for found in re.finditer(turn, text, re.DOTALL)
    ]
    end, answers = 0, []
    for name in names:  # a letter of a byte-level vocabulary is a byte
        start, end = end, end + (len(name.encode()) if name in special else len(name))
        answers.append(any(start < stop and end > first for first, stop in spans))
    assert end == len(text.encode())
    return answers


@pytest.mark.parametrize(
    ("template", "turn"),
    [
        ("TEMPLATE", r"<\|im_start\|>assistant\n(.*?<\|im_end\|>\n)"),
        ("MARKED", r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)"),
    ],
)
def test_labels_are_the_turns_of_the_assistant_by_marks_or_by_what_a_turn_adds(
    made: Any, samples: list[tuple[Any, ...]], template: str, turn: str
) -> None:
    processor = made.processor(getattr(made, template))
    recipe = Conversations(processor)
    for raw, messages, _, example in samples if template == "TEMPLATE" else samples[:10]:
        if template != "TEMPLATE":
            example = recipe.example(raw)
        is_image = example["input_ids"] == processor.image_token_id
        grids = iter((example["image_grid_thw"].prod(1) // 4).tolist())
        ids, labels, skip = [], [], 0
        for place, number in enumerate(example["input_ids"].tolist()):  # one token for each image again
            if is_image[place] and skip:
                skip -= 1
            else:
                ids.append(number)
                labels.append(int(example["labels"][place]))
                skip = next(grids) - 1 if is_image[place] else 0
        expected = learned(processor, ids, processor.apply_chat_template(messages), turn)
        assert labels == [token if own else -100 for token, own in zip(ids, expected, strict=True)]
        assert set(example["labels"][is_image].tolist()) <= {-100}


def conversation(*turns: tuple[str, Any], **others: Any) -> bytes:
    messages = [{"role": role, "content": content} for role, content in turns]
    return json.dumps({"messages": messages, **others}).encode()


def test_an_image_that_the_assistant_shows_is_not_learned_and_neither_is_a_first_token(made: Any) -> None:
    recipe = Conversations(made.processor(made.MARKED))
    raw = {"__key__": "0", "json": conversation(("assistant", "see <image>!")), "jpg": picture(80, 120)}
    example = recipe.example(raw)
    is_image = example["input_ids"] == made.processor().image_token_id
    assert is_image.sum() > 1
    assert set(example["labels"][is_image].tolist()) == {-100}
    from_first = Conversations(
        made.processor(),
        chat_template="{% generation %}{{ messages[0]['content'] }}{% endgeneration %}",
    )
    example = from_first.example({"__key__": "0", "json": conversation(("assistant", "abc"))})
    assert example["labels"].tolist() == [-100, *example["input_ids"].tolist()[1:]]


def picture(width: int, height: int, kind: str = "JPEG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (width % 256, height % 256, 7)).save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_positions_are_those_that_the_model_itself_computes(
    made: Any, recipe: Conversations, samples: list[tuple[Any, ...]], kind: str
) -> None:
    import importlib

    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[kind]
    model = object.__new__(getattr(module, f"{name}Model"))  # without weights
    torch.nn.Module.__init__(model)
    model.config = getattr(importlib.import_module("transformers"), f"{name}Config")()
    examples = [example for *_, example in samples[:12]]
    expected = []
    for example in examples:
        ids = example["input_ids"][None]
        positions, _ = model.get_rope_index(
            ids,
            mm_token_type_ids=(ids == made.processor().image_token_id).int(),
            image_grid_thw=example["image_grid_thw"],
        )
        expected.append(positions)
    assert torch.equal(recipe.flat(examples)["position_ids"], torch.cat(expected, 2))


def test_the_flat_form_is_the_examples_one_after_the_other(
    recipe: Conversations, samples: list[tuple[Any, ...]]
) -> None:
    examples = [samples[number][-1] for number in (0, 7, 3)]
    batch = recipe.flat(examples)
    assert batch["cu_seqlens"].dtype == torch.int32
    bounds = batch["cu_seqlens"].tolist()
    assert bounds == [0, *itertools.accumulate(len(example["input_ids"]) for example in examples)]
    for example, (start, stop) in zip(examples, itertools.pairwise(bounds), strict=True):
        for name in ("input_ids", "labels"):
            assert torch.equal(batch[name][:, start:stop], example[name][None])
        assert batch["labels"][0, start] == -100
    for name in ("pixel_values", "image_grid_thw"):
        assert torch.equal(batch[name], torch.cat([example[name] for example in examples]))
    alone = recipe.flat([recipe.example({"__key__": "0", "json": conversation(("user", "a"))})])
    assert {name: (value.ndim, value.dtype) for name, value in alone.items()} == {
        name: (value.ndim, value.dtype) for name, value in batch.items()
    }


def test_a_model_has_the_loss_of_the_samples_by_themselves_on_a_flat_batch(
    made: Any, recipe: Conversations, samples: list[tuple[Any, ...]]
) -> None:
    model = small_model(made.processor()).eval()
    examples = [samples[number][-1] for number in (0, 7, 3, 11)]

    @torch.no_grad()
    def loss(batch: dict[str, torch.Tensor], positions: torch.Tensor) -> float:
        inputs = {name: batch[name] for name in ("input_ids", "pixel_values", "image_grid_thw")}
        if not len(inputs["image_grid_thw"]):
            inputs = {"input_ids": inputs["input_ids"]}
        logits = model(**inputs, position_ids=positions, use_cache=False).logits
        return float(
            torch.nn.functional.cross_entropy(logits[0, :-1], batch["labels"][0, 1:], reduction="sum")
        )

    alone = sum(loss(batch, batch["position_ids"]) for batch in (recipe.flat([each]) for each in examples))
    batch = recipe.flat(examples)
    of_text = torch.cat([batch["positions"][None], batch["position_ids"]])
    assert loss(batch, of_text) == pytest.approx(alone, rel=1e-6)
    assert loss(batch, batch["position_ids"]) != pytest.approx(alone, rel=1e-6)  # samples see those before


def small_model(processor: Any) -> torch.nn.Module:
    """Qwen2.5-VL in double precision with random weights."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    ids = processor.tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(processor.tokenizer),
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
            "bos_token_id": None,
            "eos_token_id": None,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [0],
            "window_size": 112,
        },
        image_token_id=processor.image_token_id,
        video_token_id=processor.video_token_id,
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )
    torch.manual_seed(0)
    return Qwen2_5_VLForConditionalGeneration(config).double()


def test_the_form_of_torchtitan_has_the_next_token_as_label_and_positions_that_restart(
    recipe: Conversations, samples: list[tuple[Any, ...]]
) -> None:
    examples = [samples[number][-1] for number in (1, 5, 4)]
    batch, flat = recipe.shifted(examples), recipe.flat(examples)
    tokens, labels, positions, rotary = [], [], [], []
    starts = flat["cu_seqlens"].tolist()
    for example, start in zip(examples, starts, strict=False):
        for place in range(len(example["input_ids"]) - 1):
            tokens.append(int(example["input_ids"][place]))
            labels.append(int(example["labels"][place + 1]))
            positions.append(place)
            rotary.append(flat["position_ids"][:, 0, start + place].tolist())
    got = {name: value.tolist() for name, value in batch.items() if name not in ("pixel_values", "grid_thw")}
    assert got == {"input": tokens, "labels": labels, "positions": positions, "mrope_positions": rotary}
    assert torch.equal(batch["pixel_values"], flat["pixel_values"])
    assert torch.equal(batch["grid_thw"], flat["image_grid_thw"])


IMAGES = {"0.jpg": picture(28, 56), "1.png": picture(84, 56, "PNG"), "2.jpg": picture(112, 84)}
ONE, TWO = {"type": "image", "image": "0.jpg"}, {"type": "image", "image": "sub/00001.1.PNG"}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": [{"role": "user", "content": [TWO, ONE]}]}, ["1.png", "0.jpg"]),
        ({"messages": [{"role": "user", "content": [ONE, TWO, ONE]}]}, ["0.jpg", "1.png", "0.jpg"]),
        ({"messages": [{"role": "user", "content": "<image>a<image><image>"}]}, list(IMAGES)),
        ([{"role": "user", "content": [{"type": "image"}] * 3}], list(IMAGES)),
        (
            {"messages": [{"role": "user", "content": "<image>"}], "images": ["2.jpg"]},
            ["2.jpg"],
        ),
        (
            {"conversations": [{"from": "human", "value": "<image>"}], "image": "a/00001.1.png"},
            ["1.png"],
        ),
        (
            {
                "conversations": [{"from": "human", "value": "<image><image>\n<image>"}],
                "image": ["x.jpg"] * 3,
            },
            list(IMAGES),
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "1.png"}]}]},
            ["1.png"],
        ),
    ],
)
def test_images_are_found_by_their_names_or_else_in_the_order_of_the_tar(
    made: Any, recipe: Conversations, record: Any, expected: list[str]
) -> None:
    raw = {"__key__": "folder/00001", "json": json.dumps(record).encode(), **IMAGES}
    grids = recipe.example(raw)["image_grid_thw"]
    sizes = [Image.open(io.BytesIO(IMAGES[name])).size for name in expected]
    assert (
        grids.tolist()
        == made.processor()
        .image_processor([Image.new("RGB", size) for size in sizes])["image_grid_thw"]
        .tolist()
    )
    assert len({tuple(grid) for grid in grids.tolist()}) == len(set(expected))


def bad(text: bytes, **images: bytes) -> dict[str, Any]:
    return {"__key__": "00001", "json": text, **{f"{name[1:]}.jpg": data for name, data in images.items()}}


BAD = {
    "no JSON": (bad(b"{"), "can't be read as JSON"),
    "no member": ({"__key__": "00001", "txt": b""}, "no member 'json'"),
    "no messages": (bad(b'{"texts": []}'), "expected a list of messages"),
    "no role": (bad(b'[{"content": ""}]'), "is no message"),
    "no text": (bad(conversation(("user", 7))), "a string or a list"),
    "a video": (bad(conversation(("user", [{"type": "video"}]))), "expected a text or an image"),
    "too few images": (bad(conversation(("user", "<image><image>")), _0=IMAGES["0.jpg"]), "2 images.* 1 "),
    "too many images": (bad(conversation(("user", "a")), _0=IMAGES["0.jpg"]), "0 images.* 1 "),
    "another list": (bad(conversation(("user", "<image>"), images=["0.jpg", "1.jpg"])), "a list of 2 names"),
    "unknown name": (
        bad(conversation(("user", [ONE, {"type": "image", "image": "9.jpg"}])), _0=IMAGES["0.jpg"]),
        "'9.jpg', which is none",
    ),
    "some names": (bad(conversation(("user", [ONE, {"type": "image"}])), _0=IMAGES["0.jpg"]), "some of its"),
    "a token as text": (bad(conversation(("user", "<|image_pad|>"))), "1 image tokens for 0 images"),
    "too long": (bad(conversation(("user", "b" * 500))), "5.. tokens, more than max_length=300"),
    "no prompt": (bad(conversation(("assistant", "a"))), "begins with the assistant"),
    "refused": (bad(conversation(("tool", "a"))), "refuses the conversation: no tools"),
    "too narrow": (bad(conversation(("user", "<image>")), _0=picture(1, 201)), "refuses"),
    "too large": (bad(conversation(("user", "<image>")), _0=picture(300, 400)), "300×400 .* 90,000 pixels"),
    "no image": (bad(conversation(("user", "<image>")), _0=b"no image"), "not an image"),
}
WITH_COSTS = {"no prompt"}
"""Bad samples that have costs, as these need no labels."""


@pytest.mark.parametrize("name", BAD)
def test_a_bad_sample_says_why_and_its_costs_are_unknown(made: Any, name: str) -> None:
    refusing = "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    recipe = Conversations(made.processor(refusing + made.TEMPLATE), max_length=300, max_image_pixels=90_000)
    raw, message = BAD[name]
    with pytest.raises(SampleError, match=message) as caught:
        recipe.example(raw)
    assert type(caught.value) in (CaptionError, DecodeError, ImageTooLarge)
    if name not in WITH_COSTS:
        assert all(map(math.isnan, recipe.costs(members(raw, made))))


def test_an_image_whose_header_tells_no_size_has_unknown_costs(made: Any, recipe: Conversations) -> None:
    text = conversation(("user", "<image>"))
    assert all(map(math.isnan, recipe.costs({"__key__": "0", "json": text, "__images__": {"jpg": (0, 0)}})))
    assert recipe.costs({"__key__": "0", "json": text, "__images__": {"jpg": (56, 56)}})[1] == 16


def test_a_template_that_changes_earlier_turns_is_refused_unless_it_has_marks(made: Any) -> None:
    changing = made.TEMPLATE.replace(
        "{{ message['content'] }}", "{{ message['content'] if loop.last else message['content'] | upper }}"
    )
    turns = (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    with pytest.raises(OptionError, match="generation"):
        Conversations(made.processor(changing)).example({"__key__": "0", "json": conversation(*turns)})
    marked = Conversations(made.processor(changing), chat_template=made.MARKED)
    labels = marked.example({"__key__": "0", "json": conversation(*turns)})["labels"]
    text = made.processor().tokenizer.decode(labels[labels >= 0])
    assert text == "b<|im_end|>d<|im_end|>"


def test_processors_without_patches_or_with_slow_tokenizers_or_several_templates_are_refused(
    made: Any,
) -> None:
    class Other:
        tokenizer = made.processor().tokenizer

    with pytest.raises(OptionError, match=r"Other has no image_processor, .*write map_sample= yourself"):
        Conversations(Other())
    with pytest.raises(OptionError, match="give chat_template="):
        Conversations(made.processor({"default": "", "tools": ""}))
    slow = made.processor()
    slow.tokenizer = SlowTokenizer()
    with pytest.raises(OptionError, match="slow tokenizer"):
        Conversations(slow)


class SlowTokenizer:
    is_fast = False


def test_the_module_is_imported_without_transformers() -> None:
    code = "import sys, streamload.integrations.conversations; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def write_conversations(made: Any, folder: Path, count: int, bad_one: int) -> dict[str, list[int]]:
    """Write two shards; returns the ids of each good sample by its key."""
    folder.mkdir()
    recipe, ids = Conversations(made.processor()), {}
    for shard in range(2):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for number in range(shard, count, 2):
                raw, _, _ = made.sample(number)
                key = raw.pop("__key__")
                if number == bad_one:
                    raw["json"] = conversation(("user", "<image>" * 9))
                else:
                    ids[key] = recipe.example({"__key__": key, **raw})["input_ids"].tolist()
                for extension, data in raw.items():
                    info = tarfile.TarInfo(f"{key}.{extension}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return ids


def test_a_loader_gives_flat_batches_that_resume_and_replaces_and_counts_bad_samples(
    made: Any, tmp_path: Path
) -> None:
    ids = write_conversations(made, tmp_path / "shards", 40, bad_one=9)
    options: dict[str, Any] = {"batch_size": 5, "batches": streamload.Batches(with_keys=True)}

    def make(workers: int, cache: str, **others: Any) -> streamload.Loader:
        recipe = Conversations(made.processor())
        mapped = streamload.Workers(map_sample=recipe.example, collate=recipe.flat, **others)
        return streamload.make_loader(
            str(tmp_path / "shards"),
            num_workers=workers,
            cache_dir=tmp_path / cache,
            workers=mapped,
            **options,
        )

    batches, state = [], None
    with make(2, "first") as loader:
        for number, batch in enumerate(loader):
            bounds = batch["cu_seqlens"].tolist()
            for key, (start, stop) in zip(batch["__key__"], itertools.pairwise(bounds), strict=True):
                assert batch["input_ids"][0, start:stop].tolist() == ids[key]
            batches.append({name: batch[name].clone() for name in ("input_ids", "pixel_values")})
            if number == 2:
                state = loader.state_dict()
        assert {cause: n for cause, n in loader.stats().samples_replaced.items() if n} == {"caption": 1}
    with make(0, "other") as loader:
        loader.load_state_dict(state)
        rest = [{name: batch[name].clone() for name in batches[0]} for batch in loader]
    assert len(batches) == 8
    assert len(rest) == 5
    for batch, again in zip(batches[3:], rest, strict=True):
        assert all(torch.equal(batch[name], again[name]) for name in batch)


def test_cells_have_what_fits_by_costs_without_decoding_and_resume_on_other_ranks(
    made: Any, tmp_path: Path
) -> None:
    ids = write_conversations(made, tmp_path / "shards", 60, bad_one=9)
    recipe = Conversations(made.processor())

    def make(cache: str, rank: int = 0, ranks: int = 1, **others: Any) -> streamload.Loader:
        return streamload.make_loader(
            str(tmp_path / "shards"),
            batch_size=2 // ranks,
            cache_dir=tmp_path / cache,
            shards=streamload.Shards(
                facts={("tokens", "patches"): recipe.costs}, keep=lambda entry: entry.facts["tokens"] > 0
            ),
            batches=streamload.Batches(
                cost=("tokens", "patches"), max_tokens=1500, max_patches=1200, with_keys=True
            ),
            order=streamload.Order(rank=rank, world_size=ranks, groups=1),
            workers=streamload.Workers(map_sample=recipe.example, collate=recipe.flat),
            **others,
        )

    steps, states = [], []
    with make("first", num_workers=1) as loader:
        for batch in loader:
            for cell in loader.microbatches(batch):
                assert cell["input_ids"].shape[1] <= 1500
                assert len(cell["pixel_values"]) <= 1200
                bounds = cell["cu_seqlens"].tolist()
                for key, (start, stop) in zip(cell["__key__"], itertools.pairwise(bounds), strict=True):
                    assert cell["input_ids"][0, start:stop].tolist() == ids[key]
            steps.append([cell["__key__"] for cell in batch])
            states.append(loader.state_dict())
        assert loader.stats().samples_left_out["keep"] == 1
    assert sorted(key for step in steps for cell in step for key in cell) == sorted(ids)
    assert len(steps) <= 12  # fill: 24,000 tokens in cells of 1,500
    halves = [make("other", rank, 2, num_workers=0) for rank in range(2)]
    for loader in halves:
        loader.load_state_dict(states[2])
    dealt = [[[cell["__key__"] for cell in batch] for batch in loader] for loader in halves]
    assert [[*first, *second] for first, second in zip(*dealt, strict=True)] == steps[3:]
    for loader in halves:
        loader.close()


def test_a_state_refuses_another_processor_if_it_is_asked_to(
    made: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_conversations(made, tmp_path / "shards", 8, bad_one=-1)

    def make(processor: Any, **order: Any) -> streamload.Loader:
        recipe = pickle.loads(pickle.dumps(Conversations(processor)))
        mapped = streamload.Workers(map_sample=recipe.example, collate=recipe.flat)
        order = streamload.Order(**order)
        return streamload.make_loader(
            str(tmp_path / "shards"), num_workers=0, batch_size=2, workers=mapped, order=order
        )

    with make(made.processor()) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with make(made.processor(), strict=True) as loader, caplog.at_level(logging.WARNING, "streamload"):
        loader.load_state_dict(state)
        assert len(list(loader)) == 3
    assert not caplog.records
    other = made.processor(size={"shortest_edge": 3136, "longest_edge": 6272})
    with make(other, strict=True) as loader, pytest.raises(StateMismatch, match="map_sample"):
        loader.load_state_dict(state)


def test_prepared_images_are_refused_with_what_to_do(made: Any, tmp_path: Path) -> None:
    write_conversations(made, tmp_path / "shards", 2, bad_one=-1)
    recipe = Conversations(made.processor())
    with pytest.raises(OptionError, match="leave prepare= out"):
        streamload.make_loader(
            str(tmp_path / "shards"),
            workers=streamload.Workers(map_sample=recipe.example),
            images=streamload.Images(prepare="raw-256"),
        )


def test_the_first_lines_of_the_guide_run(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    guide = Path(__file__).parents[2] / "docs" / "guides" / "vision-language.md"
    lines = re.search(r"^```python\n(.*?)^```", guide.read_text(), re.MULTILINE | re.DOTALL)
    assert lines is not None
    write_conversations(made, tmp_path / "shards", 32, bad_one=-1)
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lambda name: made.processor())
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"urls": "shards"}
    exec(compile(lines[1], str(guide), "exec"), names)
    (said,) = re.findall(r"^ +\.\.\.  # (.*)$", lines[1], re.MULTILINE)
    assert {*said.split(", ")} == {name for name in names["cell"] if not name.startswith("__")}
    names["loader"].close()
