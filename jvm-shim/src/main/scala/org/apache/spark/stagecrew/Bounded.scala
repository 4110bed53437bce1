package org.apache.spark.stagecrew

import scala.collection.mutable

/**
 * A map of the last `limit` entries that were added. Older entries are evicted and passed to `evicted`, which may add
 * them to a sum. Updating a key does not change its position. Not thread-safe.
 */
private[stagecrew] final class Bounded[K, V](limit: Int)(evicted: (K, V) => Unit = (_: K, _: V) => ()) {
  private val entries = mutable.LinkedHashMap.empty[K, V]
  /** The number of evicted entries. */
  var forgotten = 0

  def update(key: K, value: V): Unit = {
    entries(key) = value
    while (entries.size > limit) evict(entries.head._1)
  }

  def evict(key: K): Unit = entries.remove(key).foreach { value =>
    forgotten += 1
    evicted(key, value)
  }

  def contains(key: K): Boolean = entries.contains(key)
  def get(key: K): Option[V] = entries.get(key)
  def remove(key: K): Option[V] = entries.remove(key)
  def keys: Iterable[K] = entries.keys
  def values: Iterable[V] = entries.values
  def size: Int = entries.size
}
