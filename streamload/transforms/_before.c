/* Steps before an image is decoded: its size from a JPEG header, the number of scans of an unusual JPEG, whether a JPEG
 * is sound for any decoder, and the box that torchvision's RandomResizedCrop draws. A function that returns None or
 * False leaves the answer to Python (decode.py, limits.py, pixels/segments.py, augment.py), which gives the same result,
 * several times slower.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <string.h>

/* ---- A JPEG's header ---- */

struct header {
    int height, width, components;
    int is_123, has_jfif, adobe; /* they determine the colour space; adobe: -1 without that marker */
};

static int two_bytes(const uint8_t *at) { return at[0] << 8 | at[1]; }

/* Read the segments up to the only scan; 0 for anything unusual. */
static int read_header(const uint8_t *at, const uint8_t *end, struct header *header) {
    if (end - at < 2 || at[0] != 0xff || at[1] != 0xd8)
        return 0;
    at += 2;
    while (end - at >= 4) {
        const int marker = at[1], length = two_bytes(at + 2);
        const uint8_t *payload = at + 4;
        if (at[0] != 0xff || length < 2)
            return 0;
        if (marker == 0xda)
            return header->components != 0 && end - at > 4 && payload[0] == header->components;
        at += 2 + length;
        if (at > end)
            return 0;
        if (marker == 0xc0 || marker == 0xc1) { /* baseline, extended */
            if (header->components || length < 8)
                return 0;
            header->height = two_bytes(payload + 1);
            header->width = two_bytes(payload + 3);
            header->components = payload[5];
            if (payload[0] != 8 || length != 8 + 3 * header->components)
                return 0;
            header->is_123 = header->components == 3 && payload[6] == 1 && payload[9] == 2 && payload[12] == 3;
        } else if (marker == 0xe0) {
            header->has_jfif |= length >= 16 && memcmp(payload, "JFIF", 5) == 0;
        } else if (marker == 0xee) {
            if (length >= 14 && memcmp(payload, "Adobe", 5) == 0)
                header->adobe = payload[11];
        } else if (marker != 0xc4 && marker != 0xdb && marker != 0xdd && marker != 0xfe &&
                   (marker < 0xe1 || marker > 0xef)) {
            return 0; /* neither tables, restart interval, comment nor application data */
        }
    }
    return 0;
}

/* As jdapimin.c of libjpeg: JFIF is YCbCr; otherwise Adobe's marker decides, then the component IDs. */
static int is_ycbcr_or_grey(const struct header *header) {
    if (header->components == 1)
        return 1;
    if (header->components != 3)
        return 0;
    return header->has_jfif || (header->adobe < 0 ? header->is_123 : header->adobe == 1);
}

static PyObject *jpeg_size(PyObject *Py_UNUSED(module), PyObject *start) {
    char *data;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(start, &data, &size) < 0)
        return NULL;
    struct header header = {.adobe = -1};
    const uint8_t *at = (const uint8_t *)data;
    if (!read_header(at, at + size, &header) || !is_ycbcr_or_grey(&header) || !header.height || !header.width)
        Py_RETURN_NONE;
    return Py_BuildValue("(ii)", header.height, header.width);
}

/* ---- A JPEG's scans ---- */

enum { MOST_MARKERS = 1 << 16, ARITHMETIC = 8 };

/* The number of passes over the pixels in decoding: one per scan, eight per arithmetic-coded scan; -1 for more markers
 * than any real JPEG has. */
static long count_passes(const uint8_t *at, const uint8_t *end) {
    long passes = 0, of_scan = 1;
    for (int markers = 0; markers < MOST_MARKERS; markers++) {
        do {
            at = memchr(at, 0xff, (size_t)(end - at));
            if (!at || end - at < 2)
                return passes;
            at++;
        } while (at[0] == 0 || at[0] == 0xff || (at[0] & 0xf8) == 0xd0); /* stuffed 0xff, fill bytes, restarts */
        const int marker = *at++;
        if (marker == 0xd9)
            return passes;
        if (marker == 0xda)
            passes += of_scan;
        else if (marker == 0xc9 || marker == 0xca)
            of_scan = ARITHMETIC;
        if (marker >= 0xc0 && marker != 0xd8) { /* libjpeg skips lower ones, or refuses them */
            const int length = end - at < 2 ? 2 : two_bytes(at);
            const int skipped = length < 2 ? 2 : length;
            at = end - at < skipped ? end : at + skipped;
        }
    }
    return -1;
}

static PyObject *jpeg_passes(PyObject *Py_UNUSED(module), PyObject *jpeg) {
    char *data;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(jpeg, &data, &size) < 0)
        return NULL;
    return PyLong_FromLong(count_passes((const uint8_t *)data, (const uint8_t *)data + size));
}

/* ---- Whether a JPEG is sound for any decoder ---- */

enum { TABLES = 4, MOST_COMPONENTS = 3, MOST_SEGMENTS = 1024, LONGEST_SIDE = 65500, MOST_PIXELS = 1 << 26 };

struct tables {
    int quantisation, dc, ac; /* bits by number */
};

static int begins(const uint8_t *payload, int length, const char *with, int bytes) {
    return length >= bytes && memcmp(payload, with, (size_t)bytes) == 0;
}

/* Tables of 8 bits. */
static int read_quantisation(const uint8_t *payload, int length, struct tables *tables) {
    for (; length > 0; payload += 65, length -= 65) {
        if (length < 65 || payload[0] >= TABLES)
            return 0;
        tables->quantisation |= 1 << payload[0];
    }
    return 1;
}

static int read_huffman(const uint8_t *payload, int length, struct tables *tables) {
    while (length > 0) {
        if (length < 17 || (payload[0] & 15) >= TABLES || payload[0] >> 4 > 1)
            return 0;
        const int is_ac = payload[0] >> 4;
        int values = 0, code = 0;
        for (int bits = 1; bits <= 16; bits++) {
            values += payload[bits];
            code += payload[bits];
            if (code >= 1 << bits) /* no room for so many codes, as none is all ones */
                return 0;
            code <<= 1;
        }
        if (values > 256 || length < 17 + values)
            return 0;
        for (int i = 0; i < values && !is_ac; i++)
            if (payload[17 + i] >= 16)
                return 0;
        *(is_ac ? &tables->ac : &tables->dc) |= 1 << (payload[0] & 15);
        payload += 17 + values;
        length -= 17 + values;
    }
    return 1;
}

/* 8 bits, in gray or three components of the usual sampling; returns the number of components. */
static int read_frame(const uint8_t *payload, int length) {
    if (length < 9 || payload[0] != 8 || length != 6 + 3 * payload[5])
        return 0;
    const int height = two_bytes(payload + 1), width = two_bytes(payload + 3);
    if (!height || !width || height > LONGEST_SIDE || width > LONGEST_SIDE || (int64_t)height * width > MOST_PIXELS)
        return 0;
    const int first = payload[7];
    if (payload[5] == 1)
        return first == 0x11 ? 1 : 0;
    if (payload[5] != MOST_COMPONENTS || payload[6] == payload[9] || payload[6] == payload[12] ||
        payload[9] == payload[12])
        return 0;
    const int is_usual = first == 0x11 || first == 0x21 || first == 0x12 || first == 0x22;
    return is_usual && payload[10] == 0x11 && payload[13] == 0x11 ? MOST_COMPONENTS : 0;
}

/* The only scan: all components of the frame, with tables that are there. */
static int read_scan(const uint8_t *payload, int length, const uint8_t *frame, int components, struct tables tables) {
    if (length < 1 || payload[0] != components || length != 4 + 2 * components)
        return 0;
    int scanned = 0;
    for (int i = 0; i < components; i++) {
        const int dc = payload[2 + 2 * i] >> 4, ac = payload[2 + 2 * i] & 15;
        if (dc >= TABLES || ac >= TABLES || !(tables.dc >> dc & 1) || !(tables.ac >> ac & 1))
            return 0;
        for (int j = 0; j < components; j++) {
            const int quantisation = frame[8 + 3 * j];
            if (frame[6 + 3 * j] == payload[1 + 2 * i] && quantisation < TABLES &&
                tables.quantisation >> quantisation & 1)
                scanned |= 1 << j;
        }
    }
    return scanned == (1 << components) - 1;
}

/* Segments that Pillow parses, and may stumble over, are left to Python. */
static int is_skipped(int marker, const uint8_t *payload, int length) {
    if (marker == 0xfe)
        return 1;
    if (marker < 0xe0 || marker > 0xef)
        return 0;
    if (begins(payload, length, "JFIF", 4) || begins(payload, length, "Adobe", 5))
        return length >= (marker == 0xee ? 12 : 14);
    return !begins(payload, length, "Exif\0", 6) && !begins(payload, length, "ICC_PROFILE", 12) &&
           !begins(payload, length, "MPF", 4) && !begins(payload, length, "Photoshop 3.0", 14);
}

/* Whether the next marker that isn't within a scan is the end mark; stuffed 0xff and restarts are within. */
static int is_followed_by_end(const uint8_t *at, const uint8_t *end) {
    while ((at = memchr(at, 0xff, (size_t)(end - at))) && end - at >= 2) {
        at++;
        if (*at != 0 && (*at & 0xf8) != 0xd0)
            return *at == 0xd9;
    }
    return 0;
}

static int is_sound(const uint8_t *at, const uint8_t *end) {
    struct tables tables = {0, 0, 0};
    const uint8_t *frame = NULL;
    int components = 0;
    if (end - at < 2 || at[0] != 0xff || at[1] != 0xd8)
        return 0;
    at += 2;
    for (int segments = 0; segments < MOST_SEGMENTS && end - at >= 4 && at[0] == 0xff; segments++) {
        const int marker = at[1], length = two_bytes(at + 2) - 2;
        const uint8_t *payload = at + 4;
        if (length < 0 || length > end - payload)
            return 0;
        at = payload + length;
        int is_read;
        if (marker == 0xda)
            return components && read_scan(payload, length, frame, components, tables) && is_followed_by_end(at, end);
        if (marker == 0xdb)
            is_read = read_quantisation(payload, length, &tables);
        else if (marker == 0xc4)
            is_read = read_huffman(payload, length, &tables);
        else if (marker == 0xdd)
            is_read = length == 2;
        else if (marker == 0xc0 || marker == 0xc1) {
            is_read = !components && (components = read_frame(payload, length));
            frame = payload;
        } else
            is_read = is_skipped(marker, payload, length);
        if (!is_read)
            return 0;
    }
    return 0;
}

static PyObject *jpeg_is_sound(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "expected an address and a size, got %zd arguments", count);
    const size_t address = PyLong_AsSize_t(arguments[0]);
    const Py_ssize_t size = PyLong_AsSsize_t(arguments[1]);
    if (PyErr_Occurred())
        return NULL;
    const uint8_t *at = (const uint8_t *)address;
    return PyBool_FromLong(size > 0 && is_sound(at, at + size));
}

/* ---- A random box ---- */

enum { TRIES = 10, NUMBERS = 2 * TRIES + 2, SHIFT = 397 };

/* The first numbers of a Mersenne Twister with a 32-bit seed, like torch's CPU generator. */
static void draw(uint32_t seed, uint32_t numbers[NUMBERS]) {
    uint32_t state[SHIFT + NUMBERS];
    state[0] = seed;
    for (uint32_t i = 1; i < SHIFT + NUMBERS; i++)
        state[i] = 1812433253u * (state[i - 1] ^ state[i - 1] >> 30) + i;
    for (int i = 0; i < NUMBERS; i++) {
        const uint32_t both = (state[i] & 0x80000000u) | (state[i + 1] & 0x7fffffffu);
        uint32_t number = state[i + SHIFT] ^ both >> 1 ^ (both & 1 ? 0x9908b0dfu : 0);
        number ^= number >> 11;
        number ^= number << 7 & 0x9d2c5680u;
        number ^= number << 15 & 0xefc60000u;
        numbers[i] = number ^ number >> 18;
    }
}

/* torch's conversion of a number to a float32 between 0 and 1. */
static double unit(uint32_t number) { return (number & 0xffffff) * (1.0 / 0x1000000); }

/* Whether float32 rounding, far less than a millionth, could change the number of pixels. */
static int is_near_half(double length) { return fabs(fmod(length, 1.0) - 0.5) <= 1e-6 * length; }

static PyObject *random_box(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    enum { SEED, HEIGHT, WIDTH, SHARE, SHARE_SPAN, LOG_RATIO, LOG_RATIO_SPAN, ALL };
    if (count != ALL)
        return PyErr_Format(PyExc_TypeError, "expected %d arguments, got %zd", ALL, count);
    const uint32_t seed = (uint32_t)PyLong_AsUnsignedLongMask(arguments[SEED]);
    const long height = PyLong_AsLong(arguments[HEIGHT]), width = PyLong_AsLong(arguments[WIDTH]);
    double of[ALL];
    for (int i = SHARE; i < ALL; i++)
        of[i] = PyFloat_AsDouble(arguments[i]);
    if (PyErr_Occurred())
        return NULL;
    uint32_t numbers[NUMBERS];
    draw(seed, numbers);
    const double area = (double)height * width;
    for (int i = 0; i < 2 * TRIES; i += 2) {
        const double share = of[SHARE] + of[SHARE_SPAN] * unit(numbers[i]);
        const double ratio = exp(of[LOG_RATIO] + of[LOG_RATIO_SPAN] * unit(numbers[i + 1]));
        const double across = sqrt(area * share * ratio), down = sqrt(area * share / ratio);
        if (across >= width + 1.0 || down >= height + 1.0)
            continue;
        if (is_near_half(across) || is_near_half(down))
            Py_RETURN_NONE;
        const long box_height = lrint(down), box_width = lrint(across);
        if (box_width < 1 || box_width > width || box_height < 1 || box_height > height)
            continue;
        const long top = (long)(numbers[i + 2] % (uint32_t)(height - box_height + 1));
        const long left = (long)(numbers[i + 3] % (uint32_t)(width - box_width + 1));
        return Py_BuildValue("(llll)i", top, left, box_height, box_width, i + 4);
    }
    return Py_BuildValue("()i", 2 * TRIES);
}

/* ---- Python ---- */

static PyMethodDef functions[] = {
    {"jpeg_size", jpeg_size, METH_O, "See decode.py."},
    {"jpeg_passes", jpeg_passes, METH_O, "See limits.py."},
    {"jpeg_is_sound", (PyCFunction)(void (*)(void))jpeg_is_sound, METH_FASTCALL, "See pixels/segments.py."},
    {"random_box", (PyCFunction)(void (*)(void))random_box, METH_FASTCALL, "See augment.py."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_before", .m_doc = "What goes before an image's pixels.", .m_size = 0,
    .m_methods = functions};

PyMODINIT_FUNC PyInit__before(void) { return PyModuleDef_Init(&module); }
