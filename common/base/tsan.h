/* What ThreadSanitizer cannot see by itself: memory that passes from one thread to another through a library that is
 * not built with it, or through another process. Nothing in other builds. */
#ifndef TD_BASE_TSAN_H
#define TD_BASE_TSAN_H

#if defined(__SANITIZE_THREAD__)
#define TD_HAS_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define TD_HAS_TSAN 1
#endif
#endif

#ifdef TD_HAS_TSAN
void __tsan_acquire(void *addr);
void __tsan_release(void *addr);
/* All that was done before a release of an address is seen after an acquire of it. */
#define TD_TSAN_ACQUIRE(p) __tsan_acquire(p)
#define TD_TSAN_RELEASE(p) __tsan_release(p)
#else
#define TD_TSAN_ACQUIRE(p) ((void)(p))
#define TD_TSAN_RELEASE(p) ((void)(p))
#endif

#endif
