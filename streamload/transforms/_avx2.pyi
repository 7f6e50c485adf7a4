def is_supported() -> bool: ...
def resize_into(
    source: int,
    row_bytes: int,
    height: int,
    width: int,
    is_bilinear: bool,
    is_columns_first: bool,
    new_height: int,
    new_width: int,
    out: int,
    top: int,
    left: int,
    part_height: int,
    part_width: int,
    statistics: bytes | None,
    /,
) -> None: ...
