"""Rules of `spec.data.files`: each names its content, and is of a store that pods and machines reach alike. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kestrl._shared.spec.job import JobSpec
from kestrl._shared.spec.problems import Problem
from kestrl._shared.spec.scalars import OBJECT_SCHEMES, PinnedFile


def file_problems(spec: JobSpec) -> Iterator[Problem]:
    """Problems of the files that tools read."""
    files = spec.data.files
    if files and spec.environment is not None:
        yield Problem("spec.data.files", "are read by spec.tools; remove them: spec.environment has files of its own")
    uris: set[str] = set()
    for index, file in enumerate(files):
        field = f"spec.data.files[{index}].uri"
        if file.uri in uris:
            yield Problem(field, "is listed twice; remove one")
        uris.add(file.uri)
        scheme = file.uri.partition("://")[0] if "://" in file.uri else "file"
        if scheme not in OBJECT_SCHEMES | {"file"}:
            yield Problem(field, f"scheme {scheme}:// is not one of a file; use s3://, gs:// or az://, or a local path")
        elif scheme in OBJECT_SCHEMES and PinnedFile.read(file.uri) is None:
            yield Problem(
                field,
                f"{file.uri} does not say which content is meant; end it with #sha256= and the 64 digits that "
                "`sha256sum FILE` prints",
            )
