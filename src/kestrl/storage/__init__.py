"""Object storage through obstore (`file://`, `s3://`, `gs://`, `az://`), and the layout of adapters in it."""

from kestrl.storage.adapters import (
    AdapterManifest,
    Probe,
    adapter_folder,
    fetch_adapter,
    publish_adapter,
    read_manifest,
)
from kestrl.storage.objects import ObjectStore, open_store

__all__ = [
    "AdapterManifest",
    "ObjectStore",
    "Probe",
    "adapter_folder",
    "fetch_adapter",
    "open_store",
    "publish_adapter",
    "read_manifest",
]
