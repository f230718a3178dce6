"""Hostile octets for property bytes and field tables: `python tests/fuzz/amqp_properties.py -max_total_time=60`.

The oracle: `scan` refuses with an AmqpError or everything later works: decode, encode, and edits that leave the rest
alone. The normal tests draw a small sample through `check`.
"""

import sys
from contextlib import nullcontext

try:
    import atheris
except ImportError:
    atheris = None

with atheris.instrument_imports(include=["headrace"]) if __name__ == "__main__" else nullcontext():
    from headrace.gateways.amqp import fields, properties
    from headrace.gateways.amqp.errors import AmqpError


def check(data: bytes) -> None:
    try:
        table, end = fields.decode_table(data)
    except AmqpError:
        pass
    else:
        assert fields.check_table(data) == end
        again, _ = fields.decode_table(fields.encode_table(table))
        assert fields.encode_table(again) == fields.encode_table(table)
    try:
        properties.scan(data)
    except AmqpError:
        return
    read = properties.decode(data)
    assert properties.encode(read) == data
    edited = properties.with_headers(data, {"x-death": [{"count": fields.Int64(1)}]})
    headers = properties.decode(edited).headers
    assert headers is not None
    assert headers["x-death"] == [{"count": 1}]
    rest = {name: value for name, value in (read.headers or {}).items() if name != "x-death"}
    assert fields.encode_table({name: headers[name] for name in rest}) == fields.encode_table(rest)
    assert properties.decode(properties.with_expiration(data, None)).expiration is None


if __name__ == "__main__":
    if atheris is None:
        sys.exit("atheris is not installed")
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()
