"""The messages of etcd's API as `rpc.proto` describes them; `rpc_pb2.pyi` has their types.

The classes are made from the description when this module is imported. Code that the protobuf
compiler generates would only run with that compiler's version of protobuf or a newer one. The
descriptions lie in a pool of their own, so another etcd client in the process does not clash.
"""

from __future__ import annotations

from importlib.resources import files

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_pool = DescriptorPool()
_set = FileDescriptorSet.FromString(files(__package__).joinpath("rpc.binpb").read_bytes())
for _file in _set.file:
    _pool.AddSerializedFile(_file.SerializeToString())
    for _name, _message in _pool.FindFileByName(_file.name).message_types_by_name.items():
        globals()[_name] = GetMessageClass(_message)
