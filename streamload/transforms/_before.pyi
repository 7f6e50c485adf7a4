def jpeg_size(start: bytes, /) -> tuple[int, int] | None: ...
def jpeg_passes(jpeg: bytes, /) -> int: ...
def random_box(
    seed: int,
    height: int,
    width: int,
    share: float,
    share_span: float,
    log_ratio: float,
    log_ratio_span: float,
    /,
) -> tuple[tuple[int, int, int, int] | tuple[()], int] | None: ...
