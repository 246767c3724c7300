//! The element types of GGUF tensors.

use std::fmt;

/// How a tensor's elements are stored: in blocks of `block_len` elements, `block_bytes` each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types, reason = "the names that the format and its users know")]
pub enum GgmlType {
    /// float32
    F32,
    /// IEEE half
    F16,
    /// bfloat16
    BF16,
    /// float64
    F64,
    /// 4 bits, one scale for 32
    Q4_0,
    /// 4 bits, scale and minimum for 32
    Q4_1,
    /// 5 bits, one scale for 32
    Q5_0,
    /// 5 bits, scale and minimum for 32
    Q5_1,
    /// 8 bits, one scale for 32
    Q8_0,
    /// 8 bits, scale and sum for 32
    Q8_1,
    /// 2 bits in super-blocks of 256
    Q2_K,
    /// 3 bits in super-blocks of 256
    Q3_K,
    /// 4 bits in super-blocks of 256
    Q4_K,
    /// 5 bits in super-blocks of 256
    Q5_K,
    /// 6 bits in super-blocks of 256
    Q6_K,
    /// int8
    I8,
    /// int16
    I16,
    /// int32
    I32,
    /// int64
    I64,
}

use GgmlType::*;

/// Type, number in the file, name, elements a block, bytes a block.
const TYPES: [(GgmlType, u32, &str, u64, u64); 19] = [
    (F32, 0, "F32", 1, 4),
    (F16, 1, "F16", 1, 2),
    (Q4_0, 2, "Q4_0", 32, 18),
    (Q4_1, 3, "Q4_1", 32, 20),
    (Q5_0, 6, "Q5_0", 32, 22),
    (Q5_1, 7, "Q5_1", 32, 24),
    (Q8_0, 8, "Q8_0", 32, 34),
    (Q8_1, 9, "Q8_1", 32, 36),
    (Q2_K, 10, "Q2_K", 256, 84),
    (Q3_K, 11, "Q3_K", 256, 110),
    (Q4_K, 12, "Q4_K", 256, 144),
    (Q5_K, 13, "Q5_K", 256, 176),
    (Q6_K, 14, "Q6_K", 256, 210),
    (I8, 24, "I8", 1, 1),
    (I16, 25, "I16", 1, 2),
    (I32, 26, "I32", 1, 4),
    (I64, 27, "I64", 1, 8),
    (F64, 28, "F64", 1, 8),
    (BF16, 30, "BF16", 1, 2),
];

/// Types that exist and that this reader has no sizes for: named when they are refused.
const REFUSED: [(u32, &str); 14] = [
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];

impl GgmlType {
    fn row(self) -> &'static (GgmlType, u32, &'static str, u64, u64) {
        TYPES.iter().find(|row| row.0 == self).expect("every type has a row in the table")
    }

    /// The type with this number in the file, or the name it is known by elsewhere.
    pub fn from_id(id: u32) -> Result<Self, String> {
        if let Some(row) = TYPES.iter().find(|row| row.1 == id) {
            return Ok(row.0);
        }
        let name = REFUSED.iter().find(|(refused, _)| *refused == id);
        Err(name.map_or_else(|| format!("type number {id}"), |(_, name)| format!("{name} ({id})")))
    }

    /// The number in the file.
    pub fn id(self) -> u32 {
        self.row().1
    }

    /// As the format calls it.
    pub fn name(self) -> &'static str {
        self.row().2
    }

    /// Elements in one block.
    pub fn block_len(self) -> u64 {
        self.row().3
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> u64 {
        self.row().4
    }

    /// Bytes of `elements` in a row, `None` where that is not a whole number of blocks or where
    /// it does not fit in 64 bits.
    pub fn bytes_for(self, elements: u64) -> Option<u64> {
        if !elements.is_multiple_of(self.block_len()) {
            return None;
        }
        (elements / self.block_len()).checked_mul(self.block_bytes())
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
