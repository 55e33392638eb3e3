"""The shape of stage 0 of Determined's tutorial `core_api`: a loop that knows no trainer."""

import logging


def main(increment_by: int) -> None:
    x = 0
    for _ in range(12):
        x += increment_by
    logging.info(f"x is now {x}")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main(increment_by=3)
