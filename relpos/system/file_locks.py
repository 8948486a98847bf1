"""The system's locks on an open file: `flock` where there is one, `msvcrt.locking` on Windows."""

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

    def try_to_lock(descriptor: int) -> bool:
        """Lock an open file, and return whether nobody else had locked it."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def wait_and_lock(descriptor: int) -> None:
        """Lock an open file, as soon as nobody else has locked it."""
        fcntl.flock(descriptor, fcntl.LOCK_EX)

    def release(descriptor: int) -> None:
        """Release the lock of an open file."""
        fcntl.flock(descriptor, fcntl.LOCK_UN)
