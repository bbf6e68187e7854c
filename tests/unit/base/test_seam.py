from __future__ import annotations

import threading

import pytest

from core.base.seam import Seam


def test_a_value_is_put_back_after_an_error():
    seam, seen = Seam(1), list[int]()
    with pytest.raises(KeyboardInterrupt), seam.replaced(2):
        with seam.replaced(3):
            thread = threading.Thread(target=lambda: seen.append(seam.value))
            thread.start()
            thread.join()
        seen.append(seam.value)
        raise KeyboardInterrupt
    assert (seen, seam.value) == ([3, 2], 1)
