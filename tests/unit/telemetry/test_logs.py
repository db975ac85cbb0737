"""Log lines that cannot be written raise no error."""

from __future__ import annotations

import errno
import io

from pdmesh.telemetry.logs import SteadyStream


class Disk(io.StringIO):
    """A file with room for a limited number of characters. As on a full file system, the rest is
    cut off.
    """

    room = 1_000

    def write(self, text: str, /) -> int:
        written = text[: self.room]
        self.room -= len(written)
        super().write(written)
        if len(written) < len(text):
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(text)


def test_a_line_that_does_not_fit_on_the_disk_raises_nothing_and_spoils_no_later_line() -> None:
    disk = Disk()
    stream = SteadyStream(disk)
    stream.write('{"number": 1}\n')
    disk.room = 5
    stream.write('{"number": 2}\n')
    stream.write('{"number": 3}\n')
    disk.room = 1_000
    stream.write('{"number": 4}\n')
    stream.write('{"number": 5}\n')
    assert disk.getvalue().splitlines() == [
        '{"number": 1}',
        '{"num',
        '{"number": 4}',
        '{"number": 5}',
    ]


def test_a_closed_stream_still_accepts_lines() -> None:
    disk = Disk()
    disk.close()
    stream = SteadyStream(disk)
    stream.write("a line\n")
    stream.flush()
