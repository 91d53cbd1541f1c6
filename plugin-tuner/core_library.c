/* libhoccl.so is the static library of the folder; a shared library needs one source of its own. */
typedef int hocclCoreLibrary;
