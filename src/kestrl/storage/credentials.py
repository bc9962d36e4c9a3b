"""Credentials of object storage in a folder whose files may change while a program runs.

On a cluster a Secret is mounted there, with a file for each of its keys, named as an environment variable. Without such
a folder, credentials are those of the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from obstore.exceptions import UnknownConfigurationKeyError

FOLDER_VARIABLE = "KESTRL_STORAGE_CREDENTIALS"
"""Environment variable with the folder."""
PREFIXES: Mapping[str, str] = {"s3": "AWS_", "s3a": "AWS_", "gs": "GOOGLE_", "az": "AZURE_", "abfs": "AZURE_"}
"""Prefixes of the variables of each kind of storage, by the scheme of its addresses."""
CURRENT = "..data"
"""Kubernetes' link to the present files of a mounted Secret. A change of the Secret replaces the link, so that the
files behind it belong together."""
READS = 5
"""Attempts to read all files, since a change may remove them meanwhile."""
CLIENT_OPTIONS = frozenset(
    {"allow_http", "allow_invalid_certificates", "connect_timeout", "default_content_type",
     "http1_only", "http2_keep_alive_interval", "http2_keep_alive_timeout", "http2_keep_alive_while_idle",
     "http2_max_frame_size", "http2_only", "pool_idle_timeout", "pool_max_idle_per_host", "proxy_ca_certificate",
     "proxy_excludes", "proxy_url", "randomize_addresses", "read_timeout", "timeout", "user_agent"}
)  # fmt: skip
"""Names, after the prefix, of options of the HTTP client. obstore takes them as such only."""
UNKNOWN_KEY = re.compile(r"Configuration key: '(?P<key>[^']*)' is not valid")
Opened = TypeVar("Opened")


def mounted_texts(folder: Path, prefix: str) -> Mapping[str, str]:
    """Texts of the files of a mounted Secret whose names begin with `prefix`, by name, without final line breaks; empty
    if there is no such folder.
    """
    for _ in range(READS - 1):
        try:
            return _texts(folder, prefix)
        except FileNotFoundError:
            continue
    return _texts(folder, prefix)


def _texts(folder: Path, prefix: str) -> Mapping[str, str]:
    try:
        current_folder = (folder / CURRENT).resolve() if (folder / CURRENT).is_symlink() else folder
        files = [
            path for path in sorted(current_folder.iterdir()) if path.name.startswith(prefix) and not path.is_dir()
        ]
    except (FileNotFoundError, NotADirectoryError):
        if folder.is_dir():
            raise
        return {}
    return {path.name: path.read_text("utf-8", "replace").rstrip("\r\n") for path in files}


def mounted_configuration(scheme: str) -> Mapping[str, str]:
    """Configuration of a kind of storage in the folder of this process, by variable; empty if it has none."""
    folder, prefix = os.environ.get(FOLDER_VARIABLE), PREFIXES.get(scheme)
    return {} if not folder or prefix is None else mounted_texts(Path(folder), prefix)


def client_options(configuration: Mapping[str, str]) -> dict[str, str]:
    """The options of the HTTP client in a configuration."""
    return {name: text for key, text in configuration.items() if (name := _option(key)) in CLIENT_OPTIONS}


def _option(variable: str) -> str:
    return variable.partition("_")[2].lower()


def opened_with(open_with: Callable[[dict[str, str]], Opened], configuration: Mapping[str, str]) -> Opened:
    """Opens a store with a configuration, less the options of the client, and less the variables that obstore does not
    know, as it does with those of the environment.
    """
    store_options = {key.lower(): text for key, text in configuration.items() if _option(key) not in CLIENT_OPTIONS}
    while True:
        try:
            return open_with(store_options)
        except UnknownConfigurationKeyError as error:
            unknown = UNKNOWN_KEY.search(str(error))
            if unknown is None or store_options.pop(unknown["key"], None) is None:
                raise
