"""Files to a prepared store: find, fingerprint, tokenize in parallel on Ray, commit.

A store is named by a hash of all that it is made from, so the same data is prepared once. A killed
preparation goes on where it stopped; one that fails because of its input leaves nothing.
"""

import hashlib
import importlib.util
import json
import logging
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.data

from pliant.data.indexing import commit
from pliant.data.records import CHATS, Reading, canonical, check_reading, decide_shape
from pliant.data.samples import Recipe, Task, apply_transform, read_samples
from pliant.data.shards import CHUNKS_DIR, STOP_FILE, quarantine_of, read_summary, write_shards
from pliant.data.sources import Record, SourceFile, checksum, cut, find_files, read_chunk
from pliant.data.store import (
    MANIFEST,
    SPLITS,
    STORE_VERSION,
    Prepared,
    find_store,
    is_finished,
    open_store,
    outage_told,
    stores_of,
)
from pliant.data.templates import choose_template
from pliant.data.tokenizer import (
    Tokenizer,
    load_tokenizer,
    open_tokenizer,
    save_tokenizer,
    train_tokenizer,
)
from pliant.errors import DataError, NoSpace, UserError
from pliant.files import file_lock
from pliant.spec.data import DataSpec, paths_of
from pliant.spec.dotted import load_dotted
from pliant.spec.job import JobSpec
from pliant.spec.resolve import overlong_of
from pliant.storage.local import LocalStorage, Storage

KEY_LENGTH = 32
STORE_BYTES_PER_SOURCE_BYTE = 8
"""A bound: a token takes 5 bytes, and there is at most about one per byte of text."""

logger = logging.getLogger(__name__)

Report = Callable[[int, int], None]
Sources = dict[str, list[SourceFile]]


@dataclass(frozen=True)
class _Order:
    """What is to be prepared, decided before any work."""

    data: DataSpec
    sources: Sources
    recipe: Recipe
    saved_tokenizer: Tokenizer | None
    """None: one is trained on the data."""
    made_from: dict[str, Any]

    @property
    def key(self) -> str:
        content = json.dumps(self.made_from, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:KEY_LENGTH]


def prepare(spec: JobSpec, root: Path, report: Report | None = None) -> Prepared:
    """The prepared store of a job's data: opened if it is there, else made.

    It is made below `root`, and taken from there to `data.store` where that is a URI. Making one
    needs a running Ray, all of whose nodes see the data and `root` under the same paths; `report`
    is told how many chunks are done, and of how many. Raises `DataError` for data that cannot be
    used, `NoSpace`, and `UserError` where the URI cannot be reached.
    """
    root = root.absolute()
    order = _decide(spec.data, root)
    store = stores_of(spec.data, root).below(order.key)
    found = find_store(store)
    if found is not None:
        return found
    path = root / order.key
    with _lock(root, order.key):
        found = find_store(store)
        if found is not None:
            return found
        if not is_finished(LocalStorage(path)):
            _make(order, path, report or (lambda done, total: None))
        if store != LocalStorage(path):
            _move(path, store)
        return open_store(store)


def find_prepared(spec: JobSpec, root: Path) -> Prepared | None:
    """The prepared store of a job's data, where there is one. Raises `UserError`."""
    root = root.absolute()
    return find_store(stores_of(spec.data, root).below(_decide(spec.data, root).key))


def _move(path: Path, store: Storage) -> None:
    """A finished store to another place; its manifest goes last. What an earlier attempt brought
    there is not sent again."""
    with outage_told(store):
        for name, entry in open_store(path).files():
            there = store.info(name)
            if there is None or there.size_bytes != entry["size_bytes"]:
                store.put_file(path / name, name)
        store.write(MANIFEST, (path / MANIFEST).read_bytes())
    shutil.rmtree(path)


# Deciding


def _decide(data: DataSpec, root: Path) -> _Order:
    sources = _find_sources(data, root / "corpora")
    record, where = _first_record(data, sources["train"])
    shape = decide_shape(data.shape, data.columns, record, where)
    path = data.tokenizer.path
    tokenizer = load_tokenizer(Path(path).expanduser()) if path else None
    template = choose_template(data.chat_template, tokenizer) if shape in CHATS else None
    reading = Reading(shape, canonical(data.train_on), data.columns, template)
    check_reading(reading, data.overlong, trains_tokenizer=tokenizer is None)
    recipe = Recipe(
        reading=reading,
        transform=data.transform,
        validation=0.0 if "validation" in sources else data.split.validation,
        test=0.0 if "test" in sources else data.split.test,
        seq_len=data.seq_len,
        overlong=overlong_of(data, shape),
        max_bad_rows=data.max_bad_rows if data.bad_rows == "skip" else 0,
    )
    made_from = _made_from(data, sources, recipe, tokenizer)
    return _Order(data, sources, recipe, tokenizer, made_from)


def _find_sources(data: DataSpec, corpora: Path) -> Sources:
    named = {"train": data.train, "validation": data.validation, "test": data.test}
    return {
        split: find_files(paths_of(source), f"data.{split}", data.format, corpora)
        for split, source in named.items()
        if source is not None
    }


def _first_record(data: DataSpec, files: list[SourceFile]) -> tuple[Record, str]:
    """The first record that the transform keeps: the data set's shape is decided by it."""
    transform = load_dotted(data.transform, "data.transform") if data.transform else None
    for file in files:
        for chunk in cut([file], data.text_unit, data.shard_samples):
            for row in read_chunk(chunk):
                if row.problem is not None and data.bad_rows == "skip":
                    continue
                raw = row.record_or_raise()
                record = apply_transform(transform, data.transform, raw, row.where)
                if record is not None:
                    return record, row.where
    raise _no_records("train", files)


def _no_records(split: str, files: list[SourceFile]) -> DataError:
    return DataError(
        f"data.{split} holds no records: {len(files)} file(s), the first of which is "
        f"{files[0].place}. Name files with at least one record that data.transform, if any, "
        "keeps.",
        key=f"data.{split}",
    )


def _made_from(
    data: DataSpec, sources: Sources, recipe: Recipe, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """All that decides a store's content, as JSON; it is kept in the manifest."""
    return {
        "store_version": STORE_VERSION,
        "sources": {
            split: [
                {"name": name, "format": file.format, "sha256": digest}
                for file, (name, digest) in zip(files, checksum(files), strict=True)
            ]
            for split, files in sources.items()
        },
        "split": {"validation": recipe.validation, "test": recipe.test},
        "origins": [file.origin for file in sources["train"]],
        "text_unit": data.text_unit,
        "shape": recipe.reading.shape,
        "columns": data.columns,
        "chat_template": recipe.reading.template.digest if recipe.reading.template else None,
        "train_on": recipe.reading.train_on,
        "seq_len": data.seq_len,
        "overlong": recipe.overlong,
        "max_bad_rows": recipe.max_bad_rows,
        "max_untrained": data.max_untrained,
        "shard_samples": data.shard_samples,
        "tokenizer": {"sha256": tokenizer.digest}
        if tokenizer
        else {"train_vocab_size": data.tokenizer.train_vocab_size},
        "transform": _transform_identity(data.transform),
    }


def _transform_identity(transform: str | None) -> dict[str, str] | None:
    """Its path and the SHA-256 of its module's source; code that it imports is not looked at."""
    if transform is None:
        return None
    found = importlib.util.find_spec(transform.rpartition(".")[0])
    origin = Path(found.origin) if found and found.origin else None
    source = origin.read_bytes() if origin and origin.is_file() else b""
    return {"path": transform, "sha256": hashlib.sha256(source).hexdigest()}


# Making


@contextmanager
def _lock(root: Path, key: str) -> Iterator[None]:
    """Held by the one process that prepares this data; the system frees it when a process dies."""
    with file_lock(root / ".locks" / key):
        yield


def _make(order: _Order, path: Path, report: Report) -> None:
    created = not path.exists()
    try:
        tasks = _tasks(order)
        unfinished = [task for task in tasks if read_summary(path, task.number) is None]
        _check_space(order.sources, path, len(unfinished) / len(tasks))
        if len(unfinished) == len(tasks):
            shutil.rmtree(quarantine_of(path), ignore_errors=True)
        for name in (*SPLITS, CHUNKS_DIR):
            (path / name).mkdir(parents=True, exist_ok=True)
        tokenizer = _tokenizer_of_store(order, tasks, path / "tokenizer")
        _run(unfinished, len(tasks), order.recipe, path, report)
        commit(
            path,
            order.key,
            order.made_from,
            tasks,
            tokenizer,
            order.recipe.max_bad_rows,
            order.data.max_untrained,
        )
    except UserError:
        if created:
            shutil.rmtree(path, ignore_errors=True)
        raise


def _tasks(order: _Order) -> list[Task]:
    """Every chunk of every split's files; a shard bears its chunk's number."""
    tasks: list[Task] = []
    for split, files in order.sources.items():
        before = len(tasks)
        for file in files:
            for chunk in cut([file], order.data.text_unit, order.data.shard_samples):
                tasks.append(Task(len(tasks), split, chunk, file.origin))
        if len(tasks) == before:
            raise _no_records(split, files)
    return tasks


def _check_space(sources: Sources, path: Path, share: float) -> None:
    source_bytes = sum(file.size_bytes for files in sources.values() for file in files)
    needed = int(source_bytes * STORE_BYTES_PER_SOURCE_BYTE * share)
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise NoSpace(
            f"{path.parent} has {free / 2**20:,.1f} MiB free, and preparing the data may need "
            f"{needed / 2**20:,.1f} MiB. Free some space, or set data.store to another disk.",
            free_bytes=free,
            needed_bytes=needed,
        )


def _tokenizer_of_store(order: _Order, tasks: list[Task], directory: Path) -> Tokenizer:
    if not directory.exists():
        tokenizer = order.saved_tokenizer
        if tokenizer is None:
            size = order.data.tokenizer.train_vocab_size
            assert size is not None, "the spec has a path or a size"
            tokenizer = train_tokenizer(_training_texts(tasks, order.recipe), size)
        unfinished = directory.with_name("tokenizer.tmp")
        save_tokenizer(tokenizer, unfinished)
        unfinished.replace(directory)
    return open_tokenizer(directory)


def _training_texts(tasks: list[Task], recipe: Recipe) -> Iterator[str]:
    for task in tasks:
        if task.split == "train":
            for sample in read_samples(task, recipe):
                if sample.split == "train" and sample.document:
                    yield "".join(turn.text for turn in sample.document.turns)


def _run(
    unfinished: list[Task], num_tasks: int, recipe: Recipe, path: Path, report: Report
) -> None:
    """Each chunk in a Ray task of its own. The first failure of a chunk stops the others, and is
    raised once none of them is writing any more."""
    done = num_tasks - len(unfinished)
    report(done, num_tasks)
    errors: dict[int, bytes] = {}
    (path / STOP_FILE).unlink(missing_ok=True)
    try:
        for row in _rows(unfinished, recipe, path):
            if row["error"]:
                errors[row["number"]] = row["error"]
            elif not errors:
                done += 1
                report(done, num_tasks)
    finally:
        (path / STOP_FILE).unlink(missing_ok=True)
    if errors:
        raise pickle.loads(errors[min(errors)])


def _rows(unfinished: list[Task], recipe: Recipe, path: Path) -> Iterator[dict[str, Any]]:
    if not unfinished:
        return
    assert ray.is_initialized(), "preparing data needs a running Ray"
    items = [{"task": pickle.dumps(task)} for task in unfinished]
    with _quiet_ray_data():
        rows = ray.data.from_items(items, override_num_blocks=len(items)).map(
            partial(_run_task, recipe=recipe, path=path), num_cpus=1
        )
        yield from rows.iter_rows()


def _run_task(row: dict[str, Any], recipe: Recipe, path: Path) -> dict[str, Any]:
    """In a Ray worker. The user's error travels as a value: raised, Ray would print its own
    account of it, and others would go on writing while the driver cleans up."""
    task: Task = pickle.loads(row["task"])
    try:
        write_shards(task, recipe, path)
    except UserError as error:
        (path / STOP_FILE).touch()
        return {"number": task.number, "error": pickle.dumps(error)}
    return {"number": task.number, "error": b""}


@contextmanager
def _quiet_ray_data() -> Iterator[None]:
    """No progress bars and no messages about the execution; everything is as before afterwards."""
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    ray_logger = logging.getLogger("ray.data")
    level = ray_logger.level
    ray_logger.setLevel(logging.ERROR)  # it warns that its progress bars are off
    try:
        with ray.data.DataContext.current(context):
            yield
    finally:
        ray_logger.setLevel(level)
