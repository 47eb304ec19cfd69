"""Payloads on the wire and on disk: a msgpack structure, followed by the tensors' contents in little-endian
order.

::

    message   = head, buffer, buffer, ...           the buffers in the order in which the structure names them
    head      = array of 3: tag (array of str and int), sent_at (float64), structure
    structure = nil | bool | int | float64 | str | bin | array | map | tensor | part | model | coded
    map       = str or int -> structure, no key twice
    tensor    = ext 1: dtype (uint8: its index in DTYPES), one uint64 (little-endian) a dimension
    part      = ext 2: tensor (the values), tensor (their coordinates), int (the whole vector's size); the coordinates are
                uint8, uint16, uint32 or int64: the narrowest that holds those of all such vectors
    model     = ext 3: tensor or part or coded (the parameters), tensor (the buffers; omitted if there are none)
              | ext 4: as ext 1 (the parameters of a model without buffers)
    coded     = ext 5: structure (what a codec made of the parameters)

The structure gives the size of every buffer, so a receiver checks it (:func:`describe`) before it allocates
any. Nothing is unpickled, and invalid bytes raise nothing but :class:`FrameError`.

Both engines use this module: ``processes`` sends the result of :func:`encode`; ``simulate`` delivers the
result of :func:`freeze` and charges :func:`wire_bytes` for it."""

from gossamer.messages.encoding import BEGIN_BYTES as BEGIN_BYTES
from gossamer.messages.encoding import CHUNK_BYTES as CHUNK_BYTES
from gossamer.messages.encoding import DATA_BYTES as DATA_BYTES
from gossamer.messages.encoding import BufferSpec as BufferSpec
from gossamer.messages.encoding import Encoded as Encoded
from gossamer.messages.encoding import FrameError as FrameError
from gossamer.messages.encoding import decode as decode
from gossamer.messages.encoding import describe as describe
from gossamer.messages.encoding import encode as encode
from gossamer.messages.encoding import framed_bytes as framed_bytes
from gossamer.messages.encoding import freeze as freeze
from gossamer.messages.encoding import overwrite as overwrite
from gossamer.messages.encoding import pack_head as pack_head
from gossamer.messages.encoding import protect as protect
from gossamer.messages.encoding import raw as raw
from gossamer.messages.encoding import unpack_head as unpack_head
from gossamer.messages.encoding import wire_bytes as wire_bytes
