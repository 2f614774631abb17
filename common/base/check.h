/* TD_CHECK is for our own mistakes and stays on in release builds; a peer, a file or a user can only cause a status. */
#ifndef TD_BASE_CHECK_H
#define TD_BASE_CHECK_H

void td_check_failed(const char *file, int line, const char *expr) __attribute__((noreturn, cold));

#define TD_CHECK(expr) ((expr) ? (void)0 : td_check_failed(__FILE__, __LINE__, #expr))
#define TD_CONTAINER_OF(ptr, type, member) ((type *)(void *)((char *)(ptr) - offsetof(type, member)))
#define TD_COUNT(array) (sizeof(array) / sizeof((array)[0]))
/* Pointers that travel through void * carry a magic number, checked on arrival. */
#define TD_MAGIC_CHECK(obj, value) TD_CHECK((obj) != NULL && (obj)->magic == (value))

#endif
