/* The kernel without Python: cases from stdin, results to stdout. Built with the kernel's code as KERNEL. */

#include <stdio.h>

#include KERNEL

struct numbers {
    int32_t height, width, by, is_columns_first, whole_height, whole_width, top, left, part_height, part_width, is_floats;
    float mean[3], std[3];
};

int main(void) {
    struct numbers n;
    if (!has_instructions())
        return 2;
    while (fread(&n, sizeof n, 1, stdin) == 1) {
        const size_t levels = (size_t)3 * n.height * n.width, results = (size_t)3 * n.part_height * n.part_width;
        const size_t bytes = results * (n.is_floats ? sizeof(float) : 1);
        uint8_t *source = malloc(levels), *out = malloc(bytes);
        if (fread(source, 1, levels, stdin) != levels)
            return 1;
        const struct image image = {n.height, n.width, source, 3 * (size_t)n.width};
        const struct whole whole = {n.whole_height, n.whole_width, n.top, n.left};
        struct result to = {.height = n.part_height, .width = n.part_width};
        memcpy(to.mean, n.mean, sizeof n.mean);
        memcpy(to.std, n.std, sizeof n.std);
        if (n.is_floats) {
            to.floats = (float *)out;
            find_quick(&to);
        } else {
            to.levels = out;
        }
        if (resize(image, n.by, n.is_columns_first, &whole, &to) || fwrite(out, 1, bytes, stdout) != bytes)
            return 1;
        free(source);
        free(out);
    }
    return 0;
}
