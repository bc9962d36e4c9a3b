"""Conformance suite of object stores: what a run relies on, for `kestrl.storage.ObjectStore` over any server.

A test, or somebody who is about to use an S3-compatible server, calls
`check_object_store(lambda: open_store(address))`. It raises AssertionError with the property that does not hold.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kestrl.errors import StorageError
from kestrl.storage import ObjectStore

LARGE = 12 * 1024 * 1024
"""Bytes of an object that servers take in several parts."""
WRITERS = 4


def check_object_store(make: Callable[[], ObjectStore], *, concurrent_create: bool = True) -> None:
    """Checks a store, and deletes what it has written.

    Args:
        make: Opens the store; the first call must give an empty one, and each further call the same content.
        concurrent_create: Whether of several writers at once that create one object exactly one must succeed. Some
            servers decide this only for writers one after another.

    Raises:
        AssertionError: A property does not hold; the message names it.
        KestrlError: The store cannot be used.
    """
    store = make()
    paths = store.list("")
    assert not paths, f"make() must give an empty store at first; it has {paths[:3]}"
    try:
        _check_missing(store)
        _check_contents(store, make)
        _check_creation(store, concurrent=concurrent_create)
        _check_whole(store, make)
        _check_folders(store)
    finally:
        for path in store.list(""):
            store.delete(path)
    assert store.list("") == [], "what is deleted is not listed"


def _code(call: Callable[[], object]) -> str:
    """The code of the StorageError of a call; empty if it raised none."""
    try:
        call()
    except StorageError as error:
        return error.code
    return ""


def _check_missing(store: ObjectStore) -> None:
    assert not store.exists("folder/none"), "an object that was never written does not exist"
    absent = "folder/none"
    for code in (
        _code(lambda: store.get(absent)),
        _code(lambda: store.size(absent)),
        _code(lambda: store.get_range(absent, 0, 1)),
        _code(lambda: store.get_ranges(absent, [(0, 1)])),
    ):
        assert code == "not_found", "reading a missing object is `not_found`"
    store.delete("folder/none")  # no error


def _check_contents(store: ObjectStore, make: Callable[[], ObjectStore]) -> None:
    contents = {
        "empty": b"",
        "folder/every byte": bytes(range(256)),
        "folder/umlaut \N{LATIN SMALL LETTER U WITH DIAERESIS} + % #": b"odd name",
        "large": bytes(range(256)) * (LARGE // 256),
    }
    for path, content in contents.items():
        store.put(path, content)
    for opened in (store, make()):
        for path, content in contents.items():
            assert opened.exists(path), f"{path!r} exists once it is written"
            assert opened.get(path) == content, f"{path!r} is read as it was written"
            assert opened.size(path) == len(content), f"{path!r} has the size that was written"
    middle = slice(LARGE // 2 + 5, LARGE // 2 + 1005)
    part = store.get_range("large", middle.start, 1000)
    assert part == contents["large"][middle], "a range of an object is these bytes and no others"
    spans = [(middle.start, middle.stop), (0, 3), (LARGE - 2, LARGE)]
    parts = [contents["large"][begin:end] for begin, end in spans]
    assert store.get_ranges("large", spans) == parts, "ranges of an object come in the order that was asked for"
    store.put("empty", b"new")
    assert make().get("empty") == b"new", "an object that is written again has the new content"
    store.delete("empty")
    assert _code(lambda: make().get("empty")) == "not_found", "a deleted object is gone"


def _check_creation(store: ObjectStore, *, concurrent: bool) -> None:
    store.put("created/one", b"first", create=True)
    assert _code(lambda: store.put("created/one", b"second", create=True)) == "exists", (
        "an object that exists is not created again: `exists`"
    )
    assert store.get("created/one") == b"first", "a refused creation leaves the content alone"
    if not concurrent:
        return

    def create(number: int) -> str:
        return _code(lambda: store.put("created/at once", bytes([number]), create=True))

    with ThreadPoolExecutor(WRITERS) as threads:
        codes = list(threads.map(create, range(WRITERS)))
    assert sorted(codes) == ["", *["exists"] * (WRITERS - 1)], "of several writers at once one creates the object"
    assert store.get("created/at once") == bytes([codes.index("")]), (
        "the content is that of the writer who was accepted"
    )


def _check_whole(store: ObjectStore, make: Callable[[], ObjectStore]) -> None:
    """Readers see one content or the other while it is replaced."""
    contents = [bytes([number]) * LARGE for number in range(2)]
    store.put("replaced", contents[0])
    with ThreadPoolExecutor(WRITERS) as threads:
        writes = [threads.submit(make().put, "replaced", contents[number % 2]) for number in range(WRITERS)]
        reads = [threads.submit(make().get, "replaced") for _ in range(WRITERS)]
    assert all(read.result() in contents for read in reads), "an object is read whole while another one replaces it"
    for write in writes:
        write.result()
    assert store.get("replaced") in contents, "an object that several replace at once is one of theirs"


def _check_folders(store: ObjectStore) -> None:
    for path in ("steps/2/a", "steps/10/b", "steps/10/c", "steps-old/1/d"):
        store.put(path, b"x")
    assert store.list("steps") == ["steps/10/b", "steps/10/c", "steps/2/a"], "a folder lists its own objects, sorted"
    assert store.list("steps/10") == ["steps/10/b", "steps/10/c"], "a folder in a folder does, too"
    assert store.list("none") == [], "a folder without objects is empty, and no error"
