"""What a run stores: objects through obstore (`file://`, `s3://`, `gs://`, `az://`), their layout, and adapters.

Episodes are in `kestrl.storage.episodes`, which loads protobuf and gRPC.
"""

from kestrl.storage.adapters import (
    AdapterManifest,
    Probe,
    adapter_folders,
    fetch_adapter,
    publish_adapter,
    read_manifest,
)
from kestrl.storage.layout import adapter_folder
from kestrl.storage.objects import ObjectStore, open_store

__all__ = [
    "AdapterManifest",
    "ObjectStore",
    "Probe",
    "adapter_folder",
    "adapter_folders",
    "fetch_adapter",
    "open_store",
    "publish_adapter",
    "read_manifest",
]
