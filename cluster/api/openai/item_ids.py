"""Ids of the parts of an answer.

They follow from the answer's own id, so that an answer that is written twice is the same twice.
"""

import hashlib
import itertools
from collections.abc import Callable


def item_ids(call_id: str, kind: str) -> Callable[[str], str]:
    """Makes ids that begin with a text, a new one each time.

    Args:
        kind: what they name. Where things of two kinds are found at different paces, one
            counter for both would depend on how the text was cut.
    """
    numbers = itertools.count()

    def new_id(prefix: str) -> str:
        name = f"{call_id}/{kind}/{next(numbers)}"
        return prefix + hashlib.sha256(name.encode()).hexdigest()[:24]

    return new_id
