"""Fake devices for the kubelet: `python -m tests.e2e.cluster.devices NAME=COUNT:VARIABLE ...`.

A device plugin (v1beta1) for each resource. It runs in the node's namespaces, and registers again whenever the kubelet
has a new socket: a kubelet that starts forgets its plugins and removes their sockets. The messages are described here,
so that no generator is needed.
"""

from __future__ import annotations

import sys
import threading
import time
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PLUGINS = Path("/var/lib/kubelet/device-plugins")
VERSION = "v1beta1"
POLL_SECONDS = 0.2
THREADS = 8
Field = descriptor_pb2.FieldDescriptorProto
MESSAGES: dict[str, tuple[tuple[int, str, str], ...]] = {
    "Empty": (),
    "DevicePluginOptions": ((1, "pre_start_required", "bool"), (2, "get_preferred_allocation_available", "bool")),
    "RegisterRequest": (
        (1, "version", "string"),
        (2, "endpoint", "string"),
        (3, "resource_name", "string"),
        (4, "options", "DevicePluginOptions"),
    ),
    "Device": ((1, "ID", "string"), (2, "health", "string")),
    "ListAndWatchResponse": ((1, "devices", "[Device]"),),
    "ContainerAllocateRequest": ((1, "devices_ids", "[string]"),),
    "AllocateRequest": ((1, "container_requests", "[ContainerAllocateRequest]"),),
    "Variable": ((1, "key", "string"), (2, "value", "string")),  # the wire format of a map entry
    "ContainerAllocateResponse": ((1, "envs", "[Variable]"),),
    "AllocateResponse": ((1, "container_responses", "[ContainerAllocateResponse]"),),
}
"""The used part of k8s.io/kubelet's `deviceplugin/v1beta1/api.proto`: number, name and type of each field."""


@dataclass(frozen=True, slots=True)
class Resource:
    """Devices of one kind."""

    name: str
    count: int
    variable: str
    """The variable with the devices of a container."""

    @property
    def devices(self) -> list[str]:
        return [f"{self.name.rpartition('/')[2]}-{index}" for index in range(self.count)]

    @property
    def socket(self) -> str:
        return f"{self.name.replace('/', '_')}.sock"

    def __str__(self) -> str:
        return f"{self.name}={self.count}:{self.variable}"

    @staticmethod
    def parse(text: str) -> Resource:
        name, _, rest = text.partition("=")
        count, _, variable = rest.partition(":")
        return Resource(name, int(count), variable)


NVIDIA = Resource("nvidia.com/gpu", 4, "NVIDIA_VISIBLE_DEVICES")
ASCEND = Resource("huawei.com/Ascend910", 8, "ASCEND_VISIBLE_DEVICES")


def message_classes() -> dict[str, Any]:
    """Classes of the messages."""
    file = descriptor_pb2.FileDescriptorProto(name="deviceplugin.proto", package=VERSION, syntax="proto3")
    scalars = {"bool": Field.TYPE_BOOL, "string": Field.TYPE_STRING}
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, label, kind in fields:
            single = kind.strip("[]")
            field = message.field.add(name=label, number=number)
            field.label = Field.LABEL_OPTIONAL if single == kind else Field.LABEL_REPEATED
            field.type = scalars.get(single, Field.TYPE_MESSAGE)
            if single not in scalars:
                field.type_name = f".{VERSION}.{single}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{VERSION}.{name}")) for name in MESSAGES}


CLASSES = message_classes()


class Plugin:
    """Serves one resource on a socket of its own."""

    def __init__(self, resource: Resource) -> None:
        self._resource = resource
        self._stopped = threading.Event()
        self._server = grpc.server(futures.ThreadPoolExecutor(THREADS))
        handlers = {
            "GetDevicePluginOptions": _unary(self._options, "Empty", "DevicePluginOptions"),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                self._list, CLASSES["Empty"].FromString, CLASSES["ListAndWatchResponse"].SerializeToString
            ),
            "Allocate": _unary(self._allocate, "AllocateRequest", "AllocateResponse"),
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(f"{VERSION}.DevicePlugin", handlers),)
        )

    def start(self) -> None:
        """Starts serving, and registers with the kubelet."""
        path = PLUGINS / self._resource.socket
        path.unlink(missing_ok=True)
        self._server.add_insecure_port(f"unix://{path}")
        self._server.start()
        request = CLASSES["RegisterRequest"](
            version=VERSION, endpoint=path.name, resource_name=self._resource.name, options={}
        )
        with grpc.insecure_channel(f"unix://{PLUGINS}/kubelet.sock") as channel:
            register = channel.unary_unary(
                f"/{VERSION}.Registration/Register",
                CLASSES["RegisterRequest"].SerializeToString,
                CLASSES["Empty"].FromString,
            )
            register(request, timeout=5)

    def stop(self) -> None:
        self._stopped.set()
        self._server.stop(grace=None).wait()

    def _options(self, _request: Any, _context: grpc.ServicerContext) -> Any:
        return CLASSES["DevicePluginOptions"]()

    def _list(self, _request: Any, _context: grpc.ServicerContext) -> Any:
        devices = [{"ID": name, "health": "Healthy"} for name in self._resource.devices]
        yield CLASSES["ListAndWatchResponse"](devices=devices)
        self._stopped.wait()

    def _allocate(self, request: Any, _context: grpc.ServicerContext) -> Any:
        responses = [
            {"envs": [{"key": self._resource.variable, "value": ",".join(sorted(container.devices_ids))}]}
            for container in request.container_requests
        ]
        return CLASSES["AllocateResponse"](container_responses=responses)


def _unary(method: Any, request: str, answer: str) -> Any:
    return grpc.unary_unary_rpc_method_handler(method, CLASSES[request].FromString, CLASSES[answer].SerializeToString)


def kubelet_socket() -> tuple[int, int] | None:
    """An identity of the kubelet's current socket; None if there is none."""
    with suppress(FileNotFoundError):
        found = (PLUGINS / "kubelet.sock").stat()
        return found.st_ino, found.st_ctime_ns
    return None


def main() -> None:
    resources = [Resource.parse(text) for text in sys.argv[1:]]
    registered: tuple[int, int] | None = None
    plugins: list[Plugin] = []
    while True:
        found = kubelet_socket()
        if found is not None and found != registered:
            for plugin in plugins:
                plugin.stop()
            plugins = [Plugin(resource) for resource in resources]
            try:
                for plugin in plugins:
                    plugin.start()
            except grpc.RpcError as error:
                sys.stdout.write(f"not registered: {error}\n")
            else:
                registered = found
                sys.stdout.write(f"registered {' '.join(map(str, resources))}\n")
            sys.stdout.flush()
        time.sleep(POLL_SECONDS)  # there is no event for the kubelet's new socket


if __name__ == "__main__":
    main()
