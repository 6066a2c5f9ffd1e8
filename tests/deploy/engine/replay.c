/* Run a program that replay.py wrote to a file, with all memory that it uses, and write the memory back to the file.

   The file: the numbers of threads, blocks and pointers; the size of each block; the pointers; the blocks. Block 0 is a `run`.
   A step's function is given by its name. Without a file, print what the planner asks the engine. */

#include <dlfcn.h>
#include <stdio.h>

int64_t engine_kernel_count(void); /* in another unit */
void engine_kernel(int64_t i, int32_t *shape);

typedef struct { /* in a block, to a place in another one */
  int64_t block, offset, target, target_offset;
} pointer;

static void *get(size_t size) {
  void *memory;
  if (!posix_memalign(&memory, 64, size + !size)) return memory;
  exit(1);
}

static void *take(FILE *file, size_t size) {
  void *memory = get(size);
  if (fread(memory, 1, size, file) != size) exit(2);
  return memory;
}

static void print_kernels(const char *name, int64_t count, void (*kernel)(int64_t, int32_t *)) {
  printf(", \"%s\": [", name);
  for (int64_t i = 0; i < count; i++) {
    int32_t shape[8] = {0};
    kernel(i, shape);
    printf("%s[%d", i ? ", " : "", shape[0]);
    for (int j = 1; j < 8; j++) printf(", %d", shape[j]);
    printf("]");
  }
  printf("]");
}

static int describe(void) {
  printf("{\"lanes\": %d, \"span\": %d, \"shift\": %d, \"permutes\": %d", LANES, SPAN, SHIFT, (int)engine_permutes());
  print_kernels("kernels", engine_kernel_count(), engine_kernel);
  print_kernels("int8_kernels", engine_int8_kernel_count(), engine_int8_kernel);
  printf("}\n");
  return 0;
}

static void find_functions(const run *r) {
  void *engine = dlopen(NULL, RTLD_NOW);
  for (int64_t s = 0; s < r->section_count; s++)
    for (int64_t i = 0; i < r->sections[s].count; i++) {
      step *one = (step *)r->sections[s].steps + i;
      if (!(*(void **)&one->run = dlsym(engine, (const char *)one->run))) exit(3);
      if (one->run_chain && !(*(void **)&one->run_chain = dlsym(engine, (const char *)one->run_chain))) exit(3);
    }
}

int main(int count, char **arguments) {
  if (count < 2) return describe();
  FILE *file = fopen(arguments[1], "r+b");
  if (!file) return 1;
  const int64_t *head = take(file, 3 * sizeof *head), threads = head[0], blocks = head[1], pointers = head[2];
  const int64_t *sizes = take(file, blocks * sizeof *sizes);
  const pointer *links = take(file, pointers * sizeof *links);
  char **block = get(blocks * sizeof *block);
  const long start = ftell(file);
  for (int64_t i = 0; i < blocks; i++) block[i] = take(file, sizes[i]);
  for (const pointer *p = links; p < links + pointers; p++)
    *(char **)(block[p->block] + p->offset) = block[p->target] + p->target_offset;
  const run *r = (const run *)block[0];
  find_functions(r);
  void *pool = threads > 1 ? engine_pool(threads, threads) : NULL;
  if (pool && engine_pool_threads(pool) != threads) return 4;
  engine_run(pool, r);
  if (pool) engine_pool_free(pool);
  fseek(file, start, SEEK_SET);
  for (int64_t i = 0; i < blocks; i++) fwrite(block[i], 1, sizes[i], file);
  return fclose(file) ? 1 : 0;
}
