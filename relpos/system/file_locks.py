"""The system's locks on an open file: `flock` where there is one, `msvcrt.locking` on Windows."""

import errno
import os
import sys
import time

if sys.platform == "win32":
    import msvcrt

    PLACE = 1 << 30  # the byte that is locked: nobody can read a locked byte, and the text is at the start of the file
    PAUSE = 0.05  # seconds between two attempts

    def try_to_lock(descriptor: int) -> bool:
        """Lock an open file, and return whether nobody else had locked it."""
        os.lseek(descriptor, PLACE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def wait_and_lock(descriptor: int) -> None:
        """Lock an open file, as soon as nobody else has locked it."""
        while not try_to_lock(descriptor):  # the system's own waiting gives up after ten seconds
            time.sleep(PAUSE)

    def release(descriptor: int) -> None:
        """Release the lock of an open file: closing it would release the lock too, but some time later."""
        os.lseek(descriptor, PLACE, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    # Some network file systems have no locks, for example Lustre without its option flock. A single process works
    # there all the same; on a cluster, the executor starts each part once.
    UNSUPPORTED = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}

    def _flock(descriptor: int, operation: int) -> None:
        try:
            fcntl.flock(descriptor, operation)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise

    def try_to_lock(descriptor: int) -> bool:
        """Lock an open file, and return whether nobody else had locked it."""
        try:
            _flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def wait_and_lock(descriptor: int) -> None:
        """Lock an open file, as soon as nobody else has locked it."""
        _flock(descriptor, fcntl.LOCK_EX)

    def release(descriptor: int) -> None:
        """Release the lock of an open file."""
        _flock(descriptor, fcntl.LOCK_UN)
