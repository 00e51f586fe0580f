//! The order in which structs declare their fields, which JSON objects of serde_json lose.

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Names of the fields of serialised structs, in order, each with those inside it.
#[derive(Default)]
pub(super) struct Order(pub Vec<(String, Order)>);

impl<'de> Deserialize<'de> for Order {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = Order;
            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("a value")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Order, A::Error> {
                let mut names = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    names.push(entry);
                }
                Ok(Order(names))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Order, A::Error> {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Order::default())
            }
            fn visit_bool<E>(self, _: bool) -> Result<Order, E> {
                Ok(Order::default())
            }
            fn visit_i64<E>(self, _: i64) -> Result<Order, E> {
                Ok(Order::default())
            }
            fn visit_u64<E>(self, _: u64) -> Result<Order, E> {
                Ok(Order::default())
            }
            fn visit_f64<E>(self, _: f64) -> Result<Order, E> {
                Ok(Order::default())
            }
            fn visit_str<E>(self, _: &str) -> Result<Order, E> {
                Ok(Order::default())
            }
            fn visit_unit<E>(self) -> Result<Order, E> {
                Ok(Order::default())
            }
        }
        deserializer.deserialize_any(Names)
    }
}
